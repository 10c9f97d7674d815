"""Print the public surface of an SDK as JSON: `python public_surface.py MODULE`."""

from __future__ import annotations

import importlib
import inspect
import json
import sys

CLASSES = (
    "ServiceClient TrainingClient SamplingClient RestClient AdminClient APIFuture LossHandle"
).split()


def parameters(function):
    found = []
    for parameter in inspect.signature(function).parameters.values():
        empty = parameter.default is inspect.Parameter.empty
        default = None if empty else repr(parameter.default)
        found.append([parameter.name, parameter.kind.name, default])
    return found


def surface(module):
    classes = {}
    for name in CLASSES:
        owner = getattr(module, name)
        methods = {}
        for member in dir(owner):
            if member.startswith("_") and member != "__init__":
                continue
            value = inspect.getattr_static(owner, member)
            value = getattr(value, "__func__", value)
            if inspect.isfunction(value):
                methods[member] = parameters(value)
        classes[name] = methods
    return {"classes": classes, "names": sorted(n for n in module.__all__)}


if __name__ == "__main__":
    print(json.dumps(surface(importlib.import_module(sys.argv[1]))))
