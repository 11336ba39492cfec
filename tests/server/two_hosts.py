"""Two hosts as two network namespaces of this machine, joined by one cable: 10.83.0.1 and 10.83.0.2.

Run inside `unshare --user --map-root-user --net`, as `python two_hosts.py WORKSPACE`: rank 0 here, its worker there.
Prints what listens at each address, the votes of both, at once and after a pause, and how the worker ends without the
cable.
"""

import json
import subprocess
import sys
import time
from contextlib import suppress

ADDRESS = "10.83.0.1"
PAUSE_SECONDS = 8.0


def run(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main(workspace):
    # Without network of its own until the cable is laid; it ends with this process.
    there = subprocess.Popen(["unshare", "--net", "sh", "-c", "echo; read line"], stdin=-1, stdout=-1, text=True)
    there.stdout.readline()
    at = ["nsenter", "--target", str(there.pid), "--net"]
    run("ip", "link", "add", "here", "type", "veth", "peer", "name", "there", "netns", str(there.pid))
    run("ip", "address", "add", f"{ADDRESS}/24", "dev", "here")
    run("ip", "link", "set", "here", "up")
    run("ip", "link", "set", "lo", "up")
    run(*at, "ip", "address", "add", "10.83.0.2/24", "dev", "there")
    run(*at, "ip", "link", "set", "there", "up")
    print("ready", flush=True)

    from paclm.engine.launch import start_workers
    from paclm.engine.loading import open_engine
    from paclm.engine.rendezvous import find_rendezvous
    from paclm.worlds.workspace import Workspace

    opened = Workspace.open(workspace)
    rendezvous = find_rendezvous(f"{ADDRESS}:0", opened.settings.workers.private_networks)
    worker = None
    try:
        with start_workers(opened.path, 2, rendezvous=rendezvous) as group:
            group.start()
            command = [sys.executable, "-m", "paclm", "worker", str(workspace), "--rank", "1", "--workers", "2"]
            worker = subprocess.Popen([*at, *command, "--rendezvous", group.address], stderr=-1, text=True)
            engine = open_engine(opened, 40, workers=group)
            votes = [engine.votes([1, 2, 3]).tolist()]
            listening = [run("ss", "-tlnH"), run(*at, "ss", "-tlnH")]
            time.sleep(PAUSE_SECONDS)
            votes.append(engine.votes([1, 2, 3]).tolist())
            pause_status = worker.poll()
            run("ip", "link", "set", "here", "down")
            said = worker.communicate(timeout=60)[1]
    finally:
        with suppress(ProcessLookupError):
            if worker is not None and worker.poll() is None:
                worker.kill()
        there.kill()
    addresses = [[line.split()[3].rpartition(":")[0] for line in lines.splitlines()] for lines in listening]
    print(json.dumps({"votes": votes, "listening": addresses, "pause_status": pause_status, "said": said}))


if __name__ == "__main__":
    main(sys.argv[1])
