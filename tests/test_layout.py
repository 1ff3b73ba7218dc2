"""Layout: where each tensor lies in the vector, and that nothing is lost on the way in or out."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from isofed.errors import UserError
from isofed.layout import ALIGN, Layout, Policy
from isofed.models import create


def cnn() -> nn.Module:
    return create("cnn", classes=3, shape=(2, 8, 8))


POLICIES = {
    "stages.stage1.0.weight": Policy.HOME,
    "stages.stage1.1.running_mean": Policy.HOME,
    "stages.stage2.0.weight": Policy.RESET,
    "head.bias": Policy.FIXED,
}


def test_groups_follow_each_other_in_the_documented_order() -> None:
    network = cnn()
    layout = Layout.of(network, POLICIES)
    parameters = dict(network.named_parameters())

    def group(name: str) -> str:
        policy = POLICIES.get(name, Policy.SHARED)
        return str(policy) if policy == "fixed" else f"{policy} {'trained' if name in parameters else 'statistics'}"

    order = ["home trained", "reset trained", "shared trained", "shared statistics", "home statistics", "fixed"]
    found = [group(e.name) for e in layout.entries]
    assert list(dict.fromkeys(found)) == order
    assert found == sorted(found, key=order.index)

    spans: dict[str, tuple[int, int]] = {}
    for entry in layout.entries:
        low, _ = spans.get(group(entry.name), (entry.offset, 0))
        spans[group(entry.name)] = (low, entry.offset + -(-entry.size // ALIGN) * ALIGN)
    assert layout.home_trained == slice(*spans["home trained"])
    assert layout.reset == slice(*spans["reset trained"])
    assert layout.shared_trained == slice(*spans["shared trained"])
    assert layout.trained == slice(0, spans["shared trained"][1])
    assert layout.shared == slice(spans["shared trained"][0], spans["shared statistics"][1])
    assert layout.home_statistics == slice(*spans["home statistics"])
    assert layout.total == spans["fixed"][1]


@pytest.mark.parametrize("policies", [{}, POLICIES])
def test_tensors_are_aligned_and_do_not_overlap(policies: dict[str, Policy]) -> None:
    network = cnn()
    layout = Layout.of(network, policies)
    tensors = dict(network.named_parameters()) | {n: b for n, b in network.named_buffers() if b.is_floating_point()}
    assert sorted(e.name for e in layout.entries) == sorted(tensors)
    flat = layout.pack(network)
    assert flat.data_ptr() % 64 == 0
    end = 0
    for entry, view in zip(layout.entries, layout.views(flat).values(), strict=True):
        assert entry.offset >= end
        end = entry.offset + entry.size
        assert view.data_ptr() % 64 == 0
        assert view.shape == tensors[entry.name].shape == entry.shape
    assert end <= layout.total


def test_pack_copies_and_bind_makes_the_network_a_view() -> None:
    network = cnn()
    before = {k: v.clone() for k, v in network.state_dict().items()}
    layout = Layout.of(network, POLICIES)
    flat = layout.pack(network)
    flat_before = flat.clone()
    network.get_parameter("stages.stage1.0.weight").data.add_(1)  # not bound yet: the vector must not follow
    assert torch.equal(flat, flat_before)

    layout.bind(network, flat)
    after = network.state_dict()
    assert {k: torch.equal(before[k], after[k]) for k in before} == dict.fromkeys(before, True)
    assert torch.equal(layout.pack(network), flat)
    for name, tensor in (dict(network.named_parameters()) | dict(network.named_buffers())).items():
        tensor.data.fill_(7)
        assert torch.equal(layout.views(flat)[name], torch.full_like(tensor, 7)), name
    flat.fill_(3)
    assert all(bool((t == 3).all()) for t in network.state_dict().values())


def test_gaps_are_zero() -> None:
    network = cnn()
    for tensor in network.state_dict().values():
        tensor.fill_(1)
    layout = Layout.of(network)
    flat = layout.pack(network)
    sizes = sum(t.numel() for t in network.state_dict().values())
    assert layout.total > sizes  # head.bias has 3 numbers, so there is a gap
    assert float(flat.sum()) == sizes


def test_convolutions_are_channels_last_views() -> None:
    network = cnn()
    layout = Layout.of(network)
    flat = layout.pack(network)
    layout.bind(network, flat)
    weight = network.get_parameter("stages.stage2.0.weight").detach()
    assert weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()
    assert weight.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
    out, channels, height, width = weight.shape
    entry = next(e for e in layout.entries if e.name == "stages.stage2.0.weight")
    at = entry.offset + ((5 * height + 2) * width + 1) * channels + 3  # [5, 3, 2, 1], written out
    assert float(flat[at]) == float(weight[5, 3, 2, 1]) != 0
    assert (out, channels, height, width) == (32, 16, 3, 3)


def test_a_part_of_the_vector_has_its_tensors_by_name() -> None:
    network = cnn()
    layout = Layout.of(network, POLICIES)
    flat = layout.pack(network)
    piece = layout.views(flat[layout.shared_trained], layout.shared_trained)
    values = dict(network.named_parameters())
    assert sorted(piece) == sorted(set(values) - set(POLICIES))
    assert all(torch.equal(piece[n], values[n]) for n in piece)


def test_counts_leave_out_the_gaps() -> None:
    network = cnn()
    layout = Layout.of(network, POLICIES)
    values = dict(network.named_parameters()) | dict(network.named_buffers())
    for policy in Policy:
        wanted = sum(v.numel() for n, v in values.items() if POLICIES.get(n, Policy.SHARED) == policy)
        assert layout.count(policy) == wanted


def test_bind_trains_what_is_to_be_trained_and_nothing_else() -> None:
    network = cnn()
    layout = Layout.of(network, POLICIES)
    layout.bind(network, layout.pack(network))
    assert [n for n, p in network.named_parameters() if not p.requires_grad] == ["head.bias"]


def test_a_frozen_parameter_is_fixed_whatever_its_policy() -> None:
    network = cnn()
    network.get_parameter("head.weight").requires_grad_(False)
    entry = next(e for e in Layout.of(network).entries if e.name == "head.weight")
    assert entry.policy is Policy.FIXED and not entry.trained


def test_integer_buffers_stay_outside() -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    layout = Layout.of(network)
    assert "1.num_batches_tracked" not in {e.name for e in layout.entries}
    layout.bind(network, layout.pack(network))
    network.train()
    network(torch.zeros(3, 4))
    assert int(network.get_buffer("1.num_batches_tracked")) == 1


def test_scalars_and_odd_shapes_round_trip() -> None:
    network = nn.Module()
    network.scale = nn.Parameter(torch.tensor(2.5))
    network.cube = nn.Parameter(torch.arange(30.0).view(2, 3, 5))
    network.wide = nn.Parameter(torch.arange(17.0))
    layout = Layout.of(network)
    layout.bind(network, layout.pack(network))
    assert network.scale.item() == 2.5 and network.scale.shape == ()
    assert torch.equal(network.cube, torch.arange(30.0).view(2, 3, 5))
    assert torch.equal(network.wide, torch.arange(17.0))


def test_unknown_tensor_is_refused_by_name() -> None:
    with pytest.raises(UserError, match="'head.wait', which this network does not have"):
        Layout.of(cnn(), {"head.wait": Policy.HOME})


def test_nothing_to_train_is_refused() -> None:
    network = cnn()
    with pytest.raises(UserError, match="nothing is left to train"):
        Layout.of(network, {n: Policy.FIXED for n, _ in network.named_parameters()})


def test_policies_may_be_written_as_text() -> None:
    # Policy is a StrEnum, so a method's author will write {"head.weight": "home"}; it must not be half understood.
    for policy in Policy:
        layout = Layout.of(cnn(), {"head.weight": policy.value})  # type: ignore[dict-item]
        assert layout.count(policy) == Layout.of(cnn(), {"head.weight": policy}).count(policy)


def test_a_vector_has_its_tensors_by_name_whichever_of_the_three_forms_it_has() -> None:
    network = cnn()
    layout = Layout.of(network, POLICIES)
    flat = layout.pack(network)
    for part in (layout.trained, layout.shared_trained, slice(0, layout.total)):
        found, wanted = layout.named(flat[part].double()), layout.views(flat, slice(0, layout.total))
        assert found.keys() == layout.views(flat[part], part).keys()
        assert all(torch.equal(found[name], wanted[name].double()) for name in found)
    layout.named(flat)["head.bias"].fill_(7)
    assert float(layout.views(flat)["head.bias"].min()) == 7  # views: what is written there is in the vector
    for wrong in (torch.zeros(layout.total + 1), flat[None]):
        with pytest.raises(UserError, match="gaps between the tensors included"):
            layout.named(wrong)
