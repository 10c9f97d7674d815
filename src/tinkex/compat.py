"""Run a program written for the official SDK on this one, unchanged.

    python -m tinkex.compat train.py --epochs 3
    python -m tinkex.compat -m tinker_cookbook.recipes.chat_sl.train model_name=...

In that process, and nowhere else, `import tinker` and its submodules give our objects under the
official names. Nothing is written to disk and an installed `tinker` is not touched: other processes
go on importing it. A name that we do not have is an AttributeError that says so; it never falls
back to the official package, because half of each would be neither.

In a notebook: `import tinkex.compat; tinkex.compat.install()` before the first `import tinker`.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import runpy
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from tinkex.errors import ConfigError

__all__ = ["install", "main"]

# Official module -> our modules that together hold its names, searched in order.
_CLIENTS = (
    "tinkex",
    "tinkex.client.futures",
    "tinkex.client.older_sdk",
    "tinkex.client.training.loss_tracing",
)
_MODULES: dict[str, tuple[str, ...]] = {
    "tinker": ("tinkex", "tinkex.client.older_sdk"),
    "tinker.auth": ("tinkex.auth",),
    "tinker.types": ("tinkex.types",),
    "tinker._exceptions": ("tinkex.errors",),
    "tinker._types": ("tinkex", "tinkex.types"),
    "tinker._version": ("tinkex",),
    "tinker.lib": (),
    "tinker.lib.api_future_impl": ("tinkex.client.futures",),
    "tinker.lib.internal_client_holder": ("tinkex.client.session.holder",),
    "tinker.lib.public_interfaces": _CLIENTS,
    "tinker.lib.public_interfaces.admin_client": _CLIENTS,
    "tinker.lib.public_interfaces.api_future": _CLIENTS,
    "tinker.lib.public_interfaces.custom_loss": _CLIENTS,
    "tinker.lib.public_interfaces.rest_client": _CLIENTS,
    "tinker.lib.public_interfaces.sampling_client": _CLIENTS,
    "tinker.lib.public_interfaces.service_client": _CLIENTS,
    "tinker.lib.public_interfaces.training_client": _CLIENTS,
    "tinker.lib.queue_state_logger": ("tinkex.client.session.polling",),
    "tinker.lib.retry_handler": ("tinkex.client.sampling.sample_retry",),
    "tinker.lib.retryable_exception": ("tinkex.errors",),
    "tinker.lib.telemetry": ("tinkex.client.session.telemetry",),
}
_RENAMED = {
    "BackcompatSamplingClientFuture": "DirectFuture",
    "BackcompatTrainingClientFuture": "DirectFuture",
    "InternalClientHolder": "Holder",
    "Telemetry": "Reporter",
}


def _version() -> str:
    """The generation we speak, which is what programs compare against."""
    from tinkex.client.http.headers import CONTRACT_VERSION

    return CONTRACT_VERSION


class _Alias(ModuleType):
    """A module whose names live elsewhere; found when first touched."""

    def __init__(self, name: str, sources: Sequence[str]) -> None:
        super().__init__(name, f"Names of the official SDK, as tinkex provides them: {sources}")
        self.__path__: list[str] = []  # a package without folders: only our finder has submodules
        self._sources = tuple(sources)

    def __getattr__(self, name: str) -> Any:
        if name == "__version__":
            return _version()
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        for source in self._sources:
            module = importlib.import_module(source)
            for wanted in (name, _RENAMED.get(name, name)):
                try:
                    return getattr(module, wanted)
                except AttributeError:
                    continue
        raise AttributeError(
            f"{self.__name__}.{name} is not provided by tinkex. Run the program with the official "
            "SDK, or open an issue that names it."
        )

    def __dir__(self) -> list[str]:
        return sorted({name for s in self._sources for name in dir(importlib.import_module(s))})


class _Finder(MetaPathFinder, Loader):
    """Answers for `tinker` and everything below it."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if _sources(fullname) is None:
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        sources = _sources(spec.name)
        assert sources is not None
        return _Alias(spec.name, sources)

    def exec_module(self, module: ModuleType) -> None:
        pass


def _sources(name: str) -> tuple[str, ...] | None:
    if name.startswith("tinker.types."):
        return ("tinkex.types",)  # one official module per type; ours are grouped otherwise
    return _MODULES.get(name)


_FINDER = _Finder()


def install() -> None:
    """Make `import tinker` mean tinkex, in this process, from now on.

    Raises:
        ConfigError: The official SDK was imported already.
    """
    if _FINDER in sys.meta_path:
        return
    loaded = sys.modules.get("tinker")
    if loaded is not None:
        raise ConfigError(
            f"'tinker' is already imported from {getattr(loaded, '__file__', '?')}. Call "
            "tinkex.compat.install() before the first import of it."
        )
    sys.meta_path.insert(0, _FINDER)
    _answer_for_the_distribution()


def _answer_for_the_distribution() -> None:
    """`importlib.metadata.version("tinker")` without an installed one says what we speak."""
    plain = importlib.metadata.version

    def version(distribution_name: str) -> str:
        return _version() if distribution_name.lower() == "tinker" else plain(distribution_name)

    importlib.metadata.version = version


def main(argv: Sequence[str] | None = None) -> None:
    """Run a script, `-m MODULE` or `-c CODE` as Python itself would, with `tinker` being ours."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or args[0] in ("-h", "--help"):
        print(f"{__doc__}\nusage: python -m tinkex.compat SCRIPT | -m MODULE | -c CODE [ARGS ...]")
        raise SystemExit(0 if args else 2)
    install()
    flag = args[0]
    if flag in ("-m", "-c"):
        if len(args) < 2:
            raise SystemExit(f"tinkex.compat: {flag} needs an argument")
        sys.argv = [flag, *args[2:]]
        sys.path[0] = "" if flag == "-c" else os.getcwd()
    if flag == "-m":
        runpy.run_module(args[1], run_name="__main__", alter_sys=True)
    elif flag == "-c":
        exec(compile(args[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = args
        sys.path[0] = os.path.dirname(os.path.abspath(flag))
        runpy.run_path(flag, run_name="__main__")


if __name__ == "__main__":
    # Run as a module this file is `__main__`; the finder must be the one that others import.
    importlib.import_module("tinkex.compat").main()
