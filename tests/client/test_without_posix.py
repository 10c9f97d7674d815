"""The SDK and the command line need nothing that only POSIX systems have."""

import os
import subprocess
import sys

# What Windows does not have, and one optional package. A module that is None in `sys.modules`
# raises ImportError when imported.
WITHOUT = """
import os, signal, sys
for name in ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "readline", "uvloop"):
    sys.modules[name] = None
for name in ("fork", "getuid", "geteuid", "getgid", "killpg", "setsid", "getpgid", "mkfifo"):
    if hasattr(os, name):
        delattr(os, name)
for name in ("SIGHUP", "SIGKILL", "SIGUSR1", "SIGALRM"):
    if hasattr(signal, name):
        delattr(signal, name)
"""
IMPORT_ALL = """
import importlib, pkgutil, tinkex
for name in tinkex.__all__:
    getattr(tinkex, name)
for room in ("client", "types", "wire", "contract", "chat", "cli", "recipes", "regularizers"):
    package = importlib.import_module(f"tinkex.{room}")
    for module in pkgutil.walk_packages(package.__path__, f"tinkex.{room}."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
print("all imported")
"""
TRAIN = """
import tinkex
with tinkex.ServiceClient() as service:
    model = service.get_server_capabilities().supported_models[0].model_name
    training = service.create_lora_training_client(base_model=model, rank=4)
    datum = tinkex.Datum(
        model_input=tinkex.ModelInput.from_ints([1, 2]),
        loss_fn_inputs={"target_tokens": [2, 3], "weights": [1.0, 1.0]},
    )
    print(training.train_step([datum], "cross_entropy", tinkex.AdamParams()).result().metrics)
"""


def run(code: str, **env: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT + code],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_module_a_client_may_load_imports_without_posix():
    assert run(IMPORT_ALL) == "all imported\n"


def test_a_client_trains_without_posix(toy_server):
    assert "loss:sum" in run(TRAIN, TINKER_BASE_URL=toy_server)
