"""Environments of clients: one folder each under a cache, made when missing, kept while its packages are the same."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any


def cache_folder() -> Path:
    """Outside of the repository; PACLM_CLIENTS_CACHE names another."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(os.environ.get("PACLM_CLIENTS_CACHE") or base / "paclm-clients")


def environment_of(client: dict[str, Any]) -> Path:
    """The folder of its programs; installs its packages first if they are not there."""
    is_node = "node_packages" in client
    packages, folder = client["node_packages"] if is_node else client["packages"], _folder_of(client)
    if not is_installed(client):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (_install_node if is_node else _install)(folder, packages)
        for package in client.get("debian_packages", []):
            _unpack(folder, package)
        (folder / "installed").touch()
    return folder / ("node_modules/.bin" if is_node else "bin")


def is_installed(client: dict[str, Any]) -> bool:
    """Whether its packages are there."""
    return (_folder_of(client) / "installed").exists()


def _folder_of(client: dict[str, Any]) -> Path:
    packages = client.get("node_packages") or client["packages"]
    return cache_folder() / ("+".join(name.replace("[", "-").replace("]", "") for name in packages) or "plain")


def _install(folder: Path, packages: list[str]) -> None:
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    if packages:
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, *packages], check=True)


def _install_node(folder: Path, packages: list[str]) -> None:
    subprocess.run(["npm", "install", "--silent", "--no-audit", "--no-fund", *packages], cwd=folder, check=True)


def _unpack(folder: Path, package: str) -> None:
    """Put the programs of a Debian package beside the others."""
    download = folder / "debian"
    download.mkdir()
    subprocess.run(["apt-get", "download", "--quiet", package], cwd=download, check=True, capture_output=True)
    for archive in download.glob("*.deb"):
        subprocess.run(["dpkg", "-x", str(archive), str(download)], check=True)
    for program in (download / "usr" / "bin").iterdir():
        (folder / "bin" / program.name).symlink_to(program)
