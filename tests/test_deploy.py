"""The files in deploy/ match the program: paths, metrics and secrets they name exist. Runs no container."""

import json
import re
import shlex
from collections import defaultdict
from fnmatch import fnmatch
from itertools import combinations
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from typer.main import get_command

from paclm.cli.main import app
from paclm.config import ServerConfig
from paclm.curator.master_key import load_keys
from paclm.errors import CuratorError
from paclm.server.api_keys import KeyInfo
from paclm.server.telemetry import MARKS, REFUSALS, ROUTES, Metrics, Standing

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
MANIFEST = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
POD = MANIFEST[-1]["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]
ALERTS = yaml.safe_load((DEPLOY / "alerts.yml").read_text())
PLAIN = re.sub(r"^#.*\n", "", (DEPLOY / "Containerfile").read_text(), flags=re.M)
INSTRUCTIONS = re.sub(r"\\\n\s*", " ", PLAIN)  # joined lines: one instruction each


def instructions(name):
    return re.findall(rf"^{name}\s+(.*)$", INSTRUCTIONS, flags=re.M)


def queries():
    found = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
    return found + [rule["expr"] for group in ALERTS["groups"] for rule in group["rules"]]


@pytest.fixture(scope="module")
def exported():
    """Every series the program has: name → labels, each with the values seen."""
    key = KeyInfo("alice", False, 100, 30, 20, "2026-11-15", None)
    standing = Standing(promise={}, running=1, queued=0, is_serving=True, keys=(key,))
    series = defaultdict(lambda: defaultdict(set))
    for promise, marks in MARKS.items():
        metrics = Metrics(promise)
        for mark in marks:
            metrics.count_tokens("alice", mark, 1)
        for route in ROUTES:
            for status in (200, 400, 500):
                metrics.count_request(route, status, 0.1)
        for family in text_string_to_metric_families(metrics.render(standing).decode()):
            for sample in family.samples:
                labels = series[sample.name]
                for label, value in sample.labels.items():
                    labels[label].add(value)
    return series


def test_an_alert_says_that_nothing_is_promised_about_the_corpus_any_more():
    rules = {rule["alert"]: rule for group in ALERTS["groups"] for rule in group["rules"]}
    assert rules["PaclmPromiseBroken"]["expr"] == "paclm_promise_kept == 0"


def test_dashboard_and_alerts_use_every_metric_of_the_program_and_no_other(exported):
    named = {name for query in queries() for name in re.findall(r"\b(?:paclm|process)_\w+", query)}
    assert len(named) > 20
    assert named <= set(exported)
    ours = {re.sub(r"_(bucket|sum|count)$", "", name) for name in exported if name.startswith("paclm_")}
    shown = " ".join(queries())
    assert {name for name in ours if name not in shown} <= {"paclm_build_info"}


def test_labels_in_queries_are_labels_of_their_metrics(exported):
    for query in queries():
        for name, inside in re.findall(r"(\w+)\{([^}]*)\}", query):
            for label, values in re.findall(r'(\w+)=~?"([^"]*)"', inside):
                if name != "up":
                    assert set(values.split("|")) <= exported[name][label] | set(REFUSALS), query
        names = re.findall(r"\bpaclm_\w+", query)
        for label in re.findall(r"sum by \((\w+)\)", query):
            assert all(label in exported[name] for name in names), query


def test_panels_have_ids_places_and_a_source_of_their_own():
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    source = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yml").read_text())["datasources"][0]
    assert {panel["datasource"]["uid"] for panel in panels if panel["type"] != "row"} == {source["uid"]}
    for one, other in combinations([panel["gridPos"] for panel in panels], 2):
        is_apart = [a[x] + a[w] <= b[x] for x, w in ("xw", "yh") for a, b in ((one, other), (other, one))]
        assert any(is_apart), (one, other)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)


def test_no_panel_shows_a_bound_at_the_spend():
    text = json.dumps(DASHBOARD).lower()
    assert "not a guarantee" in text
    assert "mia" not in text


def test_what_the_containerfile_copies_exists_and_enters_the_build():
    rules = [line for line in (DEPLOY / "Containerfile.dockerignore").read_text().splitlines() if line[:1] not in "#"]
    assert rules[0] == "*"
    allowed = [rule[1:] for rule in rules if rule.startswith("!")]
    copied = [word for line in instructions("COPY") if "--from" not in line for word in line.split()[:-1]]
    assert copied
    for name in copied:
        assert (ROOT / name).exists(), name
        assert any(fnmatch(name, pattern) for pattern in allowed), name
    assert sorted(copied) == sorted(allowed)  # nothing else: a workspace beside the sources must not enter the image


def test_the_container_is_unprivileged_and_has_a_health_check():
    assert instructions("USER") == ["10001:10001"]
    (health,) = instructions("HEALTHCHECK")
    command = json.loads(health[health.index("[") :])
    compile(command[2], "healthcheck", "exec")
    assert "http://127.0.0.1:8000/health" in command[2]
    assert "8000" in instructions("EXPOSE")[0]
    program, command, *arguments = json.loads(instructions("CMD")[0])  # exec form: signals arrive
    assert program == "paclm"
    options = get_command(app).commands[command].params
    known = {name for option in options for name in option.opts}
    assert [word for word in arguments if word.startswith("--") and word not in known] == []
    assert not [line for line in instructions("RUN") if shlex.split(line)[0] == "sudo"]


def test_images_have_versions_and_nothing_is_added_from_elsewhere():
    assert all(":" in line.split()[0] for line in instructions("FROM"))
    assert not instructions("ADD")
    for service in (*COMPOSE["services"].values(), CONTAINER):
        assert re.search(r":[\w.]+$", service["image"])
        assert not service["image"].endswith("latest")


def test_environment_variables_are_ones_that_the_program_reads():
    source = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    given = set(re.findall(r"\b(PACLM_\w+)=", " ".join(instructions("ENV"))))
    given |= {name for name in COMPOSE["services"]["server"]["environment"] if name.startswith("PACLM_")}
    assert {"PACLM_KEY_FILE", "PACLM_WITNESS", "PACLM_CACHE_DIR"} <= given
    assert all(f'"{name}"' in source for name in given)


def test_compose_mounts_files_that_exist_and_uses_secrets_and_volumes_it_declares():
    for service in COMPOSE["services"].values():
        for mount in service["volumes"]:
            source = re.match(r"(\$\{[^}]*\}|[^:]*):", mount)[1]
            if source.startswith("."):
                assert (DEPLOY / source).exists(), mount
            elif not source.startswith("$"):
                assert source in COMPOSE["volumes"], mount
        assert set(service["secrets"]) <= set(COMPOSE["secrets"])
        assert set(service["networks"]) <= set(COMPOSE["networks"])
    build = COMPOSE["services"]["server"]["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).is_file()


def test_every_secret_is_a_file_and_none_is_in_the_environment():
    assert all(set(secret) == {"file"} for secret in COMPOSE["secrets"].values())
    for service in COMPOSE["services"].values():
        for name, value in service.get("environment", {}).items():
            if re.search(r"KEY|PASSWORD|TOKEN|SECRET", name):
                assert name.endswith("_FILE"), name
                assert value.removeprefix("/run/secrets/") in service["secrets"]


def test_services_listen_on_loopback_drop_capabilities_and_have_time_to_stop():
    for service in COMPOSE["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
    grace = COMPOSE["services"]["server"]["stop_grace_period"]
    assert int(grace.removesuffix("s")) > ServerConfig().shutdown_seconds
    for path in DEPLOY.rglob("*.y*ml"):
        documents = list(yaml.safe_load_all(path.read_text()))
        assert all(isinstance(document, dict) for document in documents), path  # none is empty
        assert len(documents) == 1 or path.name == "kubernetes.yaml", path


def by_kind(kind):
    return [document for document in MANIFEST if document["kind"] == kind]


def test_kubernetes_has_one_replica_that_stops_before_the_next_starts_and_nothing_scales_it():
    (deployment,) = by_kind("Deployment")
    assert {document["kind"] for document in MANIFEST} == {"PersistentVolumeClaim", "Service", "Deployment"}
    assert deployment["spec"]["replicas"] == 1
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}
    claims = {claim["metadata"]["name"]: claim["spec"]["accessModes"] for claim in by_kind("PersistentVolumeClaim")}
    assert set(map(tuple, claims.values())) == {("ReadWriteOncePod",)}
    disks = [volume["persistentVolumeClaim"] for volume in POD["volumes"] if "persistentVolumeClaim" in volume]
    assert sorted(disk["claimName"] for disk in disks) == sorted(claims)
    (service,) = by_kind("Service")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"] == labels
    assert POD["terminationGracePeriodSeconds"] > ServerConfig().shutdown_seconds


def test_the_pod_is_unprivileged_and_its_user_is_that_of_the_image():
    user, group = map(int, instructions("USER")[0].split(":"))
    context = POD["securityContext"]
    assert context["runAsNonRoot"] is True
    assert (context["runAsUser"], context["runAsGroup"], context["fsGroup"]) == (user, group, group)
    assert context["fsGroupChangePolicy"] == "OnRootMismatch"  # else the group could enter the workspace: refused
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    own = CONTAINER["securityContext"]
    assert own["allowPrivilegeEscalation"] is False
    assert own["readOnlyRootFilesystem"] is True
    assert own["capabilities"] == {"drop": ["ALL"]}
    assert POD["automountServiceAccountToken"] is False
    assert POD["enableServiceLinks"] is False
    assert "privileged" not in json.dumps(MANIFEST)
    assert "hostPath" not in json.dumps(MANIFEST)
    assert {"cpu", "memory"} <= set(CONTAINER["resources"]["requests"])


def test_the_pod_runs_a_command_of_the_program_and_probes_its_health():
    program, command, folder, *arguments = CONTAINER["args"]
    assert (program, command) == ("paclm", "serve")
    known = {name for option in get_command(app).commands[command].params for name in option.opts}
    assert [word for word in arguments if word.startswith("--") and word not in known] == []
    assert [str(port["containerPort"]) for port in CONTAINER["ports"]] == instructions("EXPOSE") == [arguments[-1]]
    for probe in ("startupProbe", "readinessProbe"):
        asked = CONTAINER[probe]["httpGet"]
        assert (asked["path"], asked["port"]) == ("/health", CONTAINER["ports"][0]["name"])
    # /health is 503 while a lost worker is waited for: a liveness probe that asks for it ends a server that will go on
    assert CONTAINER["livenessProbe"]["tcpSocket"] == {"port": CONTAINER["ports"][0]["name"]}
    assert "httpGet" not in CONTAINER["livenessProbe"]
    mounts = {mount["mountPath"]: mount["name"] for mount in CONTAINER["volumeMounts"]}
    assert set(mounts.values()) == {volume["name"] for volume in POD["volumes"]}
    assert set(json.loads(instructions("VOLUME")[0])) | {"/tmp"} <= set(mounts)  # the root is read-only
    assert Path(folder).parent == Path("/workspace")  # inside: the disk's top folder is open to its group


def test_what_kubernetes_gives_to_the_program_is_read_and_the_key_is_in_a_file():
    source = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    given = {variable["name"]: variable["value"] for variable in CONTAINER["env"]}
    assert all(f'"{name}"' in source for name in given if name.startswith("PACLM_"))
    assert [name for name in given if re.search(r"KEY|PASSWORD|TOKEN", name)] == ["PACLM_KEY_COMMAND"]
    _, file = shlex.split(given["PACLM_KEY_COMMAND"])
    (secret,) = [volume for volume in POD["volumes"] if "secret" in volume]
    (mount,) = [mount for mount in CONTAINER["volumeMounts"] if mount["name"] == secret["name"]]
    assert mount["readOnly"] is True
    assert file in [f"{mount['mountPath']}/{item['path']}" for item in secret["secret"]["items"]]
    assert secret["secret"]["defaultMode"] == 0o440
    for name in ("PACLM_WITNESS", "PACLM_STATE_DIR", "PACLM_CACHE_DIR", "HF_HOME"):
        assert given[name].startswith(("/workspace/", "/witness/")), name  # on a disk that stays
    readme = (DEPLOY / "README.md").read_text()
    assert f"create secret generic {secret['secret']['secretName']} --from-file={file.rsplit('/')[-1]}=" in readme


def test_a_key_that_its_group_can_read_serves_by_command_and_not_as_a_file(tmp_path, monkeypatch):
    """As Kubernetes mounts a Secret where fsGroup is set: mode 0440."""
    key = tmp_path / "key"
    key.write_text("ab" * 32)
    key.chmod(0o440)
    for name in ("PACLM_KEY", "PACLM_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PACLM_KEY_COMMAND", f"/bin/cat {key}")
    by_command = load_keys(tmp_path, may_create=False)
    monkeypatch.delenv("PACLM_KEY_COMMAND")
    monkeypatch.setenv("PACLM_KEY_FILE", str(key))
    with pytest.raises(CuratorError, match="0440"):
        load_keys(tmp_path, may_create=False)
    key.chmod(0o400)
    assert load_keys(tmp_path, may_create=False).id == by_command.id


def test_prometheus_uses_an_admin_key_and_existing_rule_files():
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    assert job["authorization"]["credentials_file"].removeprefix("/run/secrets/") in COMPOSE["secrets"]
    assert job["static_configs"][0]["targets"] == ["server:8000"]
    assert all((DEPLOY / name).is_file() for name in config["rule_files"])
