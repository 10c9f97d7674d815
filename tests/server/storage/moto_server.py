"""A server of the S3 protocol (moto's) as a process of its own, and what is in it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import obstore
from held_port import HeldPort
from obstore.store import S3Store

BUCKET = "tinkex-test"


class MotoServer:
    def __init__(self, folder: Path) -> None:
        self._held = HeldPort()
        self.port = self._held.number
        self.url = f"http://127.0.0.1:{self.port}"
        self.env = {
            "AWS_ENDPOINT_URL": self.url,
            "AWS_ACCESS_KEY_ID": "somebody",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
        }
        self._log = (folder / "moto.log").open("ab")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "moto.server", "-p", str(self.port)]
        self._process = subprocess.Popen(
            command, stdout=self._log, stderr=self._log, env=os.environ | {"AWS_REGION": "x"}
        )
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            try:
                httpx.get(f"{self.url}/moto-api/", timeout=60)
                break
            except httpx.HTTPError:
                time.sleep(0.1)
        httpx.put(f"{self.url}/{BUCKET}", timeout=60).raise_for_status()

    def end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def close(self) -> None:
        self.end()
        self._log.close()

    def demand_keys(self, after: int) -> None:
        """From the request of that number on only known keys are let in."""
        url = f"{self.url}/moto-api/reset-auth"
        httpx.post(url, content=str(after), timeout=60).raise_for_status()

    def objects(self, prefix: str) -> dict[str, bytes]:
        store = S3Store(
            BUCKET,
            prefix=prefix,
            endpoint=self.url,
            access_key_id="somebody",
            secret_access_key="secret",
            region="us-east-1",
            client_options={"allow_http": True},
        )
        paths = [entry["path"] for page in obstore.list(store) for entry in page]
        return {path: bytes(obstore.get(store, path).bytes()) for path in sorted(paths)}
