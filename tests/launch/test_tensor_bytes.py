"""Nested data with tensors comes out of a file as it went in, or an error says why not."""

from __future__ import annotations

import math
import struct
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardproof import tensor_bytes

DTYPES = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
]


def through(tmp_path: Path, obj: Any) -> Any:
    path = tmp_path / "x.rec"
    tensor_bytes.dump(path, obj)
    assert [p.name for p in tmp_path.iterdir()] == ["x.rec"], "no temporary file may stay"
    return tensor_bytes.load(path)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3, 5)], ids=str)
def test_tensor_survives_bit_for_bit(
    tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    size = math.prod(shape) * dtype.itemsize
    raw = torch.arange(size, dtype=torch.int64).remainder(2).to(torch.uint8)
    tensor = raw.view(dtype).reshape(shape) if size else torch.empty(shape, dtype=dtype)
    # An odd neighbour first, so that the tensor is not at the start of the data.
    _, found = through(tmp_path, [torch.ones(3, dtype=torch.uint8), tensor])
    assert found.dtype == dtype and found.shape == tensor.shape
    if size:
        assert torch.equal(found.reshape(-1).view(torch.uint8), raw)


def test_views_lose_their_strides_but_not_their_values(tmp_path: Path) -> None:
    base = torch.arange(12.0).reshape(3, 4)
    cases = [base.t(), base[:, 1], base[::2], base[1:].expand(2, 2, 4), base.flip(0)]
    conjugate = torch.tensor([1 + 2j, 3 - 4j]).conj()
    for tensor in [*cases, conjugate, conjugate.imag]:
        assert torch.equal(through(tmp_path, tensor), tensor)
        assert through(tmp_path, tensor).is_contiguous()


def test_parameters_come_back_as_plain_writable_tensors(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    one, two = through(tmp_path, [parameter, parameter * 2])
    assert type(one) is torch.Tensor and not one.requires_grad
    one += 5
    assert two.tolist() == [2, 2, 2]


def test_nan_payloads_and_signed_zeros_survive_in_tensors(tmp_path: Path) -> None:
    bits = torch.tensor([0x7FF8000000000123, -0x8000000000000000], dtype=torch.int64)
    assert torch.equal(through(tmp_path, bits.view(torch.float64)).view(torch.int64), bits)


def test_special_floats_survive_outside_tensors(tmp_path: Path) -> None:
    found = through(tmp_path, [math.nan, math.inf, -math.inf, -0.0, 0.1, 5e-324, 10**30])
    assert math.isnan(found[0]) and found[1:3] == [math.inf, -math.inf]
    assert math.copysign(1, found[3]) == -1 and found[4:] == [0.1, 5e-324, 10**30]


KEYS = st.text() | st.integers() | st.booleans() | st.none() | st.tuples(st.integers(), st.text())
TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(KEYS, inner)
        | st.dictionaries(st.sampled_from(["!t", "!u", "!d", "!x", "a"]), inner)
    ),
)


@settings(max_examples=200)
@given(tree=TREES)
def test_any_tree_survives(tree: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        found = through(Path(folder), tree)
    assert repr(found) == repr(tree)  # unlike ==, tells 1 from True and a tuple from a list


def test_a_long_text_is_written_once(tmp_path: Path) -> None:
    texts = ["a" * 300, "b" * 300, "short"]
    tree = {"x": texts, "y": [*reversed(texts)] * 2, "z": {(texts[1], 1): texts[0]}}
    assert through(tmp_path, tree) == tree
    assert (tmp_path / "x.rec").read_bytes().count(b"a" * 300) == 1


@pytest.mark.parametrize(
    ("obj", "said"),
    [
        ({"a": [1, object()]}, "cannot store object at .a[1]"),
        ({"a": {1, 2}}, "cannot store set at .a"),
        ([torch.empty(3, device="meta")], "on meta at [0]"),
        (torch.eye(2).to_sparse(), "sparse"),
        ({torch.ones(1): 1}, "cannot store a tensor as dict key"),
    ],
)
def test_what_cannot_be_packed_is_named_with_its_place(tmp_path: Path, obj: Any, said: str) -> None:
    with pytest.raises(TypeError) as error:
        tensor_bytes.dump(tmp_path / "x.rec", obj)
    assert said in str(error.value)
    assert not list(tmp_path.iterdir())


def test_a_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "x.rec"
    tensor_bytes.dump(path, [1])
    with pytest.raises(TypeError):
        tensor_bytes.dump(path, [object()])
    assert tensor_bytes.load(path) == [1]


@pytest.fixture(scope="module")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that every example writes anew."""
    return tmp_path_factory.mktemp("damage") / "x.rec"


@settings(max_examples=300)
@given(data=st.data())
def test_damage_is_an_error_of_ours_or_other_data(damaged: Path, data: st.DataObject) -> None:
    tensor_bytes.dump(damaged, {"a": torch.arange(5.0), "b": (1, 2.5, [torch.ones(())]), 3: "x"})
    good = damaged.read_bytes()
    kind = data.draw(st.sampled_from(["cut", "flip", "junk"]))
    if kind == "cut":
        bad = good[: data.draw(st.integers(0, len(good) - 1))]
    elif kind == "flip":
        at = data.draw(st.integers(0, len(good) - 1))
        bad = good[:at] + bytes([good[at] ^ data.draw(st.integers(1, 255))]) + good[at + 1 :]
    else:
        bad = data.draw(st.binary(max_size=200))
    damaged.write_bytes(bad)
    try:
        tensor_bytes.load(damaged)
    except tensor_bytes.DamagedFile as error:
        assert str(damaged) in str(error)
    else:
        assert kind == "flip"  # a changed value; the run's digests are there to find that


def test_a_header_that_promises_too_much_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.rec"
    path.write_bytes(struct.pack("<8sQQ", b"SHPROOF1", 2**62, 2**62) + b"[]")
    with pytest.raises(tensor_bytes.DamagedFile, match="the header says"):
        tensor_bytes.load(path)
