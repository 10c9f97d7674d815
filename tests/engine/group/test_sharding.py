"""How a model is sharded: every weight once, adapters with their linears, refusals in words."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from table import FAMILIES, ROWS

from tinkex.engine.collectives.group import Group
from tinkex.engine.collectives.process_group import ProcessGroup
from tinkex.engine.lora.adapter import fresh_adapter
from tinkex.engine.model.decoder import native_targets
from tinkex.engine.model.families import config_from_hf
from tinkex.engine.model.shape import ExpertsConfig
from tinkex.engine.model.sharding import ModelShards, check_divides
from tinkex.engine.model.weights import RandomWeights, expected_shapes
from tinkex.engine.train.sharded_adapter import AdapterShards
from tinkex.errors import NotSupportedError


def config_of(family: str):
    return config_from_hf(ROWS[family]().to_dict())


def widened(family: str, size: int):
    """The family with heads and experts for so many members."""
    config = config_of(family)
    delta, experts = config.delta, config.experts
    if delta is not None:
        delta = replace(delta, key_heads=size, value_heads=2 * size)
    if experts is not None:
        experts = replace(experts, count=2 * size, shared_size=experts.shared_size and 4 * size)
    return replace(
        config,
        num_heads=2 * size,
        num_kv_heads=size,
        mlp_size=10 * size,
        delta=delta,
        experts=experts,
    )


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_members_hold_every_weight_once_or_whole(family, size):
    config = widened(family, size)
    shards, weights = ModelShards(config, size), RandomWeights(config)
    local = dict(expected_shapes(shards.local))
    num_whole = 0
    for name, shape in expected_shapes(config):
        tensor = weights.read(name)
        parts = [shards.weight(name, tensor, rank) for rank in range(size)]
        if parts[0].shape == shape:
            num_whole += tensor.numel()
            assert all(torch.equal(part, tensor) for part in parts)
            continue
        assert sum(part.numel() for part in parts) == tensor.numel()
        by_value = torch.cat([part.flatten() for part in parts]).sort().values
        assert torch.equal(by_value, tensor.flatten().sort().values)
        counts_all = "embed_tokens" in name or "lm_head" in name or ".mlp.experts." in name
        if not counts_all:  # the model that the member's decoder believes to be
            assert {tuple(part.shape) for part in parts} == {local[name]}
    total = sum(torch.Size(shape).numel() for _, shape in expected_shapes(config))
    assert num_whole < 0.2 * total


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_an_adapter_sharded_and_joined_is_the_same(family, size):
    config = widened(family, size)
    targets, model = native_targets(config), ModelShards(config, size)
    kinds = ("attn", "mlp", "unembed")
    whole = fresh_adapter(targets, rank=3, alpha=6, kinds=kinds, seed=1, device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in whole.parameters():
            tensor.normal_(generator=generator)
    shards = AdapterShards(whole, targets, model)
    cpu = torch.device("cpu")
    groups = [Group(ProcessGroup(rank, size, cpu, 1.0, None)) for rank in range(size)]
    members = [shards.shard(whole, group) for group in groups]
    for rank, member in enumerate(members):
        assert shards.layout(rank) == (member.layout, len(member.flat))
        shapes = model.targets(targets, rank)
        for key, group in member.groups.items():
            assert group.a_RI.shape[1] == shapes[key].in_size
            widths = [part.stop - part.start for part in shapes[key].parts]
            assert [len(b_Or) for b_Or in group.b_Or] == widths
    again = shards.rebuilt(shards.joined([member.flat for member in members]))
    assert torch.equal(again.flat, whole.flat)
    assert again.signature == whole.signature


def test_what_cannot_be_shared_evenly_is_refused_with_the_way_out():
    config = config_of("qwen3-yarn")
    with pytest.raises(NotSupportedError, match="has 2 key and value heads, which 4 .* --group 2"):
        check_divides(config, 4, "tiny")
    with pytest.raises(NotSupportedError, match="4 attention heads, which 3 .* --group 2"):
        check_divides(config, 3, "tiny")
    experts = ExpertsConfig(count=5, per_token=2, size=8)
    with pytest.raises(NotSupportedError, match="has 5 experts, which 2 devices"):
        check_divides(replace(config, experts=experts), 2, "tiny")
    hybrid = config_of("qwen3_5")
    odd = replace(hybrid.delta, key_heads=1)
    with pytest.raises(NotSupportedError, match="1 key heads of the delta .* with no --group"):
        check_divides(replace(hybrid, delta=odd), 2, "tiny")


def test_a_model_that_transformers_runs_is_refused():
    config = replace(config_of("qwen3-yarn"), native=False, arch="gpt2")
    with pytest.raises(NotSupportedError, match="through transformers .* without --group"):
        check_divides(config, 2, "tiny")
