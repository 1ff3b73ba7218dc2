"""Splits: what each kind promises, on random settings, and every way to ask for something impossible."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from isofed.data import Part, partition
from isofed.data.dirichlet import Dirichlet
from isofed.data.partition import Pathological, counts, split
from isofed.data.splitting import even
from isofed.errors import UserError

Index = npt.NDArray[np.int64]
few = settings(max_examples=25, deadline=None, derandomize=True)


def part(count: int, classes: int, domains: int = 0, seed: int = 0) -> Part:
    """Labels in random order, every class and domain there, sizes as even as they can be."""
    order = torch.from_numpy(np.random.default_rng(seed).permutation(count))
    where = order // classes % domains if domains else None
    return Part(torch.zeros(count, 1, 1, 1, dtype=torch.uint8), order % classes, where)


def assert_cover(parts: list[Index], count: int) -> None:
    """Every sample belongs to exactly one client."""
    assert all(places.dtype == np.int64 for places in parts)
    assert sorted(np.concatenate(parts).tolist()) == list(range(count))


@pytest.mark.parametrize(
    "text", ["iid", "dirichlet:0.3", "dirichlet:0.3,balance=false", "pathological:3", "domain", "quantity:0.5"]
)
def test_every_split_is_drawn_from_the_seed_alone(text: str) -> None:
    data = part(400, 10, domains=4)
    one, two, other = (split(text, data, 8, 10, seed, ("a", "b", "c", "d")) for seed in (0, 0, 1))
    assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))
    assert any(not np.array_equal(a, b) for a, b in zip(one, other, strict=True))
    assert_cover(one, 400)
    assert any(np.any(np.diff(places) < 0) for places in one), "the order within a client is random"


@few
@given(count=st.integers(1, 200), clients=st.integers(1, 20), seed=st.integers(0, 9))
def test_iid_sizes_differ_by_at_most_one(count: int, clients: int, seed: int) -> None:
    assume(clients <= count)
    parts = split("iid", part(count, 1), clients, 1, seed)
    assert_cover(parts, count)
    assert len(parts) == clients
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    chunks = np.array_split(np.arange(count), clients)
    assert all(np.array_equal(a, b) for a, b in zip(even(np.arange(count), clients), chunks, strict=True))


def test_ten_clients_unless_told_otherwise() -> None:
    assert len(split("iid", part(50, 2), None, 2, 0)) == 10
    assert len(split("dirichlet:1,min=1", part(500, 2), None, 2, 0)) == 10


@few
@given(
    alpha=st.sampled_from([0.05, 0.3, 1.0, 100.0]),
    clients=st.integers(1, 8),
    least=st.integers(0, 4),
    balance=st.booleans(),
    seed=st.integers(0, 99),
)
def test_dirichlet_covers_and_keeps_the_least_size(
    alpha: float, clients: int, least: int, balance: bool, seed: int
) -> None:
    parts = split(f"dirichlet:{alpha},balance={balance},min={least}", part(600, 6), clients, 6, seed)
    assert_cover(parts, 600)
    assert len(parts) == clients
    assert min(map(len, parts)) >= least


def test_dirichlet_follows_the_published_rule_step_by_step() -> None:
    """The numbers per class and client against the rule written plainly, with the same weights drawn."""
    sizes = np.array([50, 61, 40, 70, 33])
    for balance in (True, False):
        kind = Dirichlet(0.4, balance=balance, min=0)
        got = kind._try(sizes, 4, np.random.default_rng(3))
        rng, held, want = np.random.default_rng(3), [0] * 4, []
        for size in sizes:
            weights = rng.dirichlet([0.4] * 4)
            if balance:
                weights = np.array([w if h < sizes.sum() / 4 else 0 for w, h in zip(weights, held, strict=True)])
            cuts = (np.cumsum(weights / weights.sum()) * size).astype(int)[:-1]
            row = [len(piece) for piece in np.split(np.arange(size), cuts)]
            held = [h + r for h, r in zip(held, row, strict=True)]
            want.append(row)
        assert got is not None
        assert got.tolist() == want
        assert got.sum(1).tolist() == sizes.tolist()


def test_balance_makes_sizes_more_even_and_labels_stay_skewed() -> None:
    data = part(2000, 10)
    spread = {}
    for balance in (True, False):
        tables = [
            counts(split(f"dirichlet:0.1,balance={balance}", data, 10, 10, seed), data.labels, 10) for seed in range(40)
        ]
        spread[balance] = np.mean([table.sum(1).std() for table in tables])
        largest = np.mean([(table.max(1) / table.sum(1)).mean() for table in tables])
        assert largest > 0.4, "with iid data it would be near 0.1"
    assert spread[True] < 0.85 * spread[False]


def test_balance_gives_nothing_more_to_a_full_client() -> None:
    """A client can pass its even share by one class at most, and not by the next ones."""
    sizes = np.full(20, 30)
    for seed in range(5):
        shares = Dirichlet(0.2, min=0)._try(sizes, 5, np.random.default_rng(seed))
        assert shares is not None
        before = np.cumsum(shares, 0) - shares
        # The last client may get a sample from rounding, as in the published code.
        assert np.all(shares[before >= sizes.sum() / 5] <= 1)


@pytest.mark.parametrize("alpha", [0.05, 0.5, 5.0])
def test_shares_have_the_moments_of_a_dirichlet_distribution(alpha: float) -> None:
    """Without balance a class's shares have mean 1/K and variance (1/K)(1-1/K)/(K alpha + 1)."""
    clients, size = 5, 100_000
    rng = np.random.default_rng(0)
    kind = Dirichlet(alpha, balance=False, min=0)
    shares = kind._try(np.full(3000, size), clients, rng)
    assert shares is not None
    share = shares / size
    np.testing.assert_allclose(share.mean(0), 1 / clients, atol=0.03)
    variance = (1 / clients) * (1 - 1 / clients) / (clients * alpha + 1)
    np.testing.assert_allclose(share.var(0), variance, rtol=0.12)


def test_alpha_decides_how_different_clients_are() -> None:
    data = part(3000, 10)

    def skew(text: str) -> float:
        table = counts(split(text, data, 10, 10, 1), data.labels, 10)
        return float((table.max(1) / table.sum(1)).mean())

    assert skew("dirichlet:0.05") > skew("dirichlet:0.5") > skew("dirichlet:100") > 0.1
    inf = split("dirichlet:inf", data, 10, 10, 1)
    assert all(np.array_equal(a, b) for a, b in zip(inf, split("iid", data, 10, 10, 1), strict=True))


def test_a_tiny_alpha_draws_again_when_all_weight_is_on_full_clients() -> None:
    kind = Dirichlet(1e-4, min=0)
    rng = np.random.default_rng(0)
    tries = [kind._try(np.full(10, 30), 4, rng) for _ in range(200)]
    assert any(t is None for t in tries), "the case is there"
    assert_cover(split("dirichlet:1e-4,min=0", part(300, 10), 4, 10, 0), 300)


def test_dirichlet_gives_up_with_a_reason() -> None:
    data = part(300, 10)
    with pytest.raises(
        UserError, match=r"cannot give each of 40 clients 10 samples, as there are only 300.*30 clients"
    ):
        split("dirichlet:0.1", data, 40, 10, 0)
    start = time.perf_counter()
    with pytest.raises(UserError, match=r"in 60 tries gave each of 30 clients 9 samples \(the best left one with \d\)"):
        split("dirichlet:0.05,min=9,tries=60", data, 30, 10, 0)
    with pytest.raises(UserError, match="larger alpha, fewer clients or a smaller min"):
        split("dirichlet:1e-300,tries=5", data, 5, 10, 0)
    assert time.perf_counter() - start < 10


def test_the_hint_of_a_failed_dirichlet_split_works() -> None:
    data = part(300, 10)
    with pytest.raises(UserError) as caught:
        split("dirichlet:0.3,min=9,tries=30", data, 30, 10, 0)
    hint = str(caught.value).split("like '")[1].rstrip("'")
    parts = split(hint + ",tries=30", data, 30, 10, 0)
    assert_cover(parts, 300)


@few
@given(classes=st.integers(1, 12), clients=st.integers(1, 25), each=st.integers(1, 12), seed=st.integers(0, 99))
def test_pathological_gives_every_client_exactly_that_many_classes(
    classes: int, clients: int, each: int, seed: int
) -> None:
    assume(each <= classes <= each * clients)
    data = part(classes * 40, classes, seed=seed)
    parts = split(f"pathological:{each}", data, clients, classes, seed)
    assert_cover(parts, len(data))
    table = counts(parts, data.labels, classes)
    assert ((table > 0).sum(1) == each).all()
    holders = (table > 0).sum(0)
    assert holders.min() >= 1
    assert holders.max() - holders.min() <= 1
    for label in range(classes):
        held = table[table[:, label] > 0, label]
        assert held.max() - held.min() <= 1


def test_pathological_deals_classes_at_random() -> None:
    hands = {tuple(sorted(Pathological(2)._deal(6, 4, np.random.default_rng(seed))[3])) for seed in range(200)}
    assert len(hands) == 15, "every pair of six classes turns up"


def test_the_odd_samples_go_to_any_client() -> None:
    sizes = {tuple(map(len, split("pathological:1", part(6, 1), 4, 1, seed))) for seed in range(60)}
    assert len(sizes) == 6, "two of four clients get one more, and every pair of them does in some split"


@pytest.mark.parametrize("text", ["iid", "dirichlet:1", "pathological:2", "domain", "quantity:1"])
def test_which_samples_a_client_gets_does_not_follow_their_order(text: str) -> None:
    """Data are often sorted by person or by day, and a client must not get a run of them."""
    data = part(1200, 4, domains=2)
    parts = split(text, data, 4, 4, 0, ("a", "b"))
    for places in parts:
        for label in range(4):
            mine = np.sort(places[data.labels.numpy()[places] == label])
            if len(mine) >= 30:
                assert np.ptp(mine) > 900
                assert 300 < mine.mean() < 900


def test_pathological_refuses_the_impossible() -> None:
    data = part(100, 10)
    with pytest.raises(UserError, match="11 classes a client, but the data have 10"):
        split("pathological:11", data, 10, 10, 0)
    with pytest.raises(UserError, match="10 classes to nobody: use at least 5 clients or 4 classes a client"):
        split("pathological:2", data, 3, 10, 0)
    with pytest.raises(UserError, match="must be at least 1, not 0"):
        split("pathological:0", data, 3, 10, 0)
    with pytest.raises(UserError, match=r"class number \d to 20 clients, but it has only 10 samples"):
        split("pathological:10", data, 20, 10, 0)
    with pytest.raises(UserError, match="needs classes: write 'pathological:classes=...'"):
        split("pathological", data, 3, 10, 0)


@pytest.mark.parametrize("clients", [None, 4, 12])
def test_domain_gives_each_client_one_domain(clients: int | None) -> None:
    data = part(240, 3, domains=4)
    assert data.domains is not None
    parts = split("domain", data, clients, 3, 0, ("a", "b", "c", "d"))
    assert_cover(parts, 240)
    assert len(parts) == (clients or 4)
    table = counts(parts, data.domains, 4)
    assert ((table > 0).sum(1) == 1).all()
    assert table.argmax(1).tolist() == [client * 4 // len(parts) for client in range(len(parts))]
    assert set(table.max(1)) == {240 // len(parts)}


def test_domain_refuses_the_impossible() -> None:
    with pytest.raises(UserError, match="needs data with domains"):
        split("domain", part(20, 2), None, 2, 0)
    with pytest.raises(UserError, match="multiple of the 4 domains as clients, not 6"):
        split("domain", part(20, 2, domains=4), 6, 2, 0, ("a", "b", "c", "d"))
    with pytest.raises(UserError, match="domain 'a' has 6 samples for 7 clients"):
        split("domain", part(24, 2, domains=4), 28, 2, 0, ("a", "b", "c", "d"))


@few
@given(
    alpha=st.sampled_from([0.1, 1.0, 50.0]), clients=st.integers(1, 15), least=st.integers(0, 5), seed=st.integers(0, 9)
)
def test_quantity_covers_and_keeps_the_least_size(alpha: float, clients: int, least: int, seed: int) -> None:
    parts = split(f"quantity:{alpha},min={least}", part(90, 3), clients, 3, seed)
    assert_cover(parts, 90)
    assert len(parts) == clients
    assert min(map(len, parts)) >= least


def test_quantity_skews_sizes_and_not_labels() -> None:
    data = part(5000, 2)
    uneven, even = (split(f"quantity:{alpha}", data, 10, 2, 0) for alpha in ("0.3", "inf"))
    assert np.std([len(p) for p in uneven]) > 200
    assert np.std([len(p) for p in even]) == 0
    table = counts(uneven, data.labels, 2)
    large = table[table.sum(1) > 300]
    assert len(large) >= 2
    assert np.all(np.abs(large[:, 0] / large.sum(1) - 0.5) < 0.12)


def test_quantity_refuses_the_impossible() -> None:
    with pytest.raises(UserError, match="cannot give each of 10 clients 6 samples, as there are only 50"):
        split("quantity:1,min=6", part(50, 2), 10, 2, 0)
    with pytest.raises(UserError, match="min of split 'quantity' must be at least 0"):
        split("quantity:1,min=-1", part(50, 2), 10, 2, 0)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_split_from_a_file_is_taken_as_it_stands(tmp_path: Path, wrapped: bool) -> None:
    lists = [[3, 1], [], [0, 5]]
    path = tmp_path / "a+b,c=d.json"
    path.write_text(json.dumps({"clients": lists} if wrapped else lists))
    for text in (f"from_file:{path}", f"from_file:path={path}"):
        parts = split(text, part(6, 2), None, 2, 0)
        assert [p.tolist() for p in parts] == lists
    assert all(p.dtype == np.int64 for p in parts)
    assert len(split(f"from_file:{path}", part(6, 2), 3, 2, 0)) == 3


def test_a_wrong_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "split.json"
    cases = {
        "{": "cannot be read as JSON",
        "3": "must hold a list with a list of sample numbers",
        "[]": "must hold a list",
        '{"client": [[1]]}': "must hold a list",
        "[1, 2]": "client 0 in .* must be a list of whole numbers",
        "[[0], [1.5]]": "client 1 in .* must be a list of whole numbers",
        "[[true]]": "must be a list of whole numbers",
        "[[0, 6]]": "has sample 6, but the samples are 0 to 5",
        "[[-1]]": "has sample -1",
        "[[99999999999999999999]]": "has sample 99999999999999999999",
        "[[0, 1], [2, 1]]": "sample 1 in .* is with client 0 and again with client 1",
        "[[0], [2, 3, 2]]": "sample 2 in .* is with client 1 and again with client 1",
        "[[], []]": "gives no client a sample",
    }
    for text, message in cases.items():
        path.write_text(text)
        with pytest.raises(UserError, match=message):
            split(f"from_file:{path}", part(6, 2), None, 2, 0)
    path.write_text("[[0], [1]]")
    with pytest.raises(UserError, match="among 2 clients, not 3"):
        split(f"from_file:{path}", part(6, 2), 3, 2, 0)
    with pytest.raises(UserError, match="there is no file"):
        split(f"from_file:{tmp_path / 'none.json'}", part(6, 2), None, 2, 0)
    with pytest.raises(UserError, match="needs path"):
        split("from_file:", part(6, 2), None, 2, 0)


def test_wrong_requests_are_refused() -> None:
    data = part(20, 2)
    cases: list[tuple[str, int | None, str]] = [
        ("dirichlett:1", 2, "no partition 'dirichlett': did you mean 'dirichlet'"),
        ("dirichlet", 2, "needs alpha"),
        ("dirichlet:0", 2, "alpha of split 'dirichlet' must be above zero, like 0.1, not 0"),
        ("dirichlet:-1", 2, "above zero"),
        ("dirichlet:nan", 2, "must be a number"),
        ("quantity:0", 2, "alpha of split 'quantity' must be above zero"),
        ("dirichlet:1,min=-2", 2, "min of split 'dirichlet' must be at least 0, not -2"),
        ("dirichlet:1,tries=0", 2, "tries of split 'dirichlet' must be at least 1"),
        ("iid:3", 2, "one too many"),
        ("iid", 21, "21 clients cannot share 20 samples: use at most 20 clients"),
        ("dirichlet:1", 21, "cannot give each of 21 clients 10 samples, as there are only 20: use at most 2 clients$"),
        ("dirichlet:1,min=9", 3, "as there are only 20: use at most 2 clients or 'dirichlet:...,min=6'"),
        ("dirichlet:1,min=40", 1, "as there are only 20: use more samples or 'dirichlet:...,min=20'"),
        ("quantity:1,min=20", 2, "as there are only 20: use at most 1 client or 'quantity:...,min=10'"),
        ("iid", 0, "at least 1, not 0"),
        ("iid", -3, "at least 1, not -3"),
    ]
    for text, clients, message in cases:
        with pytest.raises(UserError, match=message):
            split(text, data, clients, 2, 0)
    with pytest.raises(UserError, match="above zero"):
        Dirichlet(float("nan"))
    with pytest.raises(UserError, match="10 clients cannot share 5 samples"):
        split("iid", part(5, 2), None, 2, 0)


def test_counts_are_the_classes_of_each_client() -> None:
    labels = torch.tensor([0, 2, 2, 1, 0])
    parts = [np.array([0, 1, 2]), np.array([], dtype=np.int64), np.array([3, 4])]
    assert counts(parts, labels, 4).tolist() == [[1, 0, 2, 0], [0, 0, 0, 0], [1, 1, 0, 0]]
    assert counts(parts, labels.numpy(), 4).dtype == np.int64
    assert counts([], labels, 4).shape == (0, 4)


def test_every_kind_has_a_line_about_it() -> None:
    lines = partition.kinds()
    assert set(lines) == {"iid", "dirichlet", "pathological", "domain", "quantity", "from_file"}
    assert all(line.endswith(".") and len(line) < 110 for line in lines.values())
