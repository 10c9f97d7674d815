"""On PYTHONPATH, this folder gives a server's GPU engine the gap that it had at db29724.

Products run in whatever order cuBLAS likes for a number of rows, and the trainer's attention is
torch's flash attention, which the sampler's decode kernel does not follow. Only for
`dev/rl_gap.py`.
"""

import importlib.abc
import importlib.machinery
import sys


def _loose_products(module):
    def product(x_TI, weight_OI, bias_O=None, dtype=None):
        return module.library(x_TI, weight_OI, bias_O, dtype)

    module.product = product


def _library_attention(module):
    import torch

    def attend(self, layer_index, q_THd, k_TKd, v_TKd, sinks_H=None, *, with_lse=True):
        assert sinks_H is None
        assert self._config.window(layer_index) is None
        bounds, longest = self._queries.bounds_q, max(self._lengths or [len(q_THd)])
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q_THd, k_TKd, v_TKd, bounds, bounds, longest, longest, 0.0, True, False,
            scale=self._config.head_size**-0.5,
        )  # fmt: skip
        assert lse.dim() == 2, "this torch packs log-sums otherwise"
        return out, lse

    module.PackedFlash.forward = attend


_CHANGES = {
    "tinkex.engine.cuda.product": _loose_products,
    "tinkex.engine.cuda.flash": _library_attention,
}


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name not in _CHANGES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            _CHANGES[name](module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, _Finder())
