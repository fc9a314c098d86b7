# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Sound files with something changed: each is equal in meaning, or refused.

Of an artifact, the meaning is its scales and all that a Deployment compares. What merely labels it
(who made it, on what data, what a serving stack calls its layers) may change unnoticed, since the
content hash covers the tensors alone. Of a shard there is no hash: a number changed into another
sound one makes another sound shard. There, what is accepted says exactly what the JSON says.
"""

import json
import math
import random
import struct

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxfp8.scales import RankShard, ScaleArtifact, ScaleArtifactError
from tests.scales import builders
from tests.scales.builders import edit_metadata, join, split

ORIGINAL = builders.artifact()
DATA = ORIGINAL.to_bytes()
OLD_DATA = builders.schema_1(DATA)
HEADER_END = 8 + int.from_bytes(DATA[:8], "little")
SHARD = builders.shard(0, 1)
QUICK = settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow])


def is_refused_or_equal(data: bytes) -> bool:
    """Whether it was refused; fails where it is neither."""
    try:
        artifact = ScaleArtifact.from_bytes(data)
        artifact.check(ORIGINAL.deployment)
    except ScaleArtifactError as error:
        assert error.problems and "\n" not in str(error)
        return True
    np.testing.assert_array_equal(artifact.descale, ORIGINAL.descale)
    if artifact.schema == "2":
        np.testing.assert_array_equal(artifact.amax, ORIGINAL.amax)
    assert artifact.deployment == ORIGINAL.deployment
    assert math.isclose(artifact.identity.margin, ORIGINAL.identity.margin, rel_tol=1e-5) or (
        artifact.schema == "1"  # it has no maxima that a margin could be held against
    )
    return False


def test_the_originals_are_sound():
    assert not is_refused_or_equal(DATA)
    assert not is_refused_or_equal(OLD_DATA)


@pytest.mark.parametrize("data", [DATA, OLD_DATA], ids=["schema 2", "schema 1"])
def test_truncated_anywhere(data):
    for length in range(len(data)):
        assert is_refused_or_equal(data[:length]), length


@pytest.mark.parametrize("data", [DATA, OLD_DATA], ids=["schema 2", "schema 1"])
@given(more=st.binary(min_size=1, max_size=64))
@QUICK
def test_bytes_added_at_the_end(data, more):
    assert is_refused_or_equal(data + more)


def test_bits_of_every_byte_of_the_header_flipped():
    accepted = 0
    rng = random.Random(0)
    for position in range(HEADER_END):
        for bit in rng.sample(range(8), 3):
            changed = bytearray(DATA)
            changed[position] ^= 1 << bit
            accepted += not is_refused_or_equal(bytes(changed))
    assert accepted < HEADER_END  # a few labels, a fraction of the bits


def test_every_bit_of_the_data_flipped():
    for position in range(HEADER_END, len(DATA)):
        for bit in range(8):
            changed = bytearray(DATA)
            changed[position] ^= 1 << bit
            assert is_refused_or_equal(bytes(changed)), (position, bit)


NAMES = st.sampled_from([name for name in split(DATA)[0] if name != "__metadata__"])
KEYS = st.sampled_from(sorted(split(DATA)[0]["__metadata__"]))
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner),
    max_leaves=6,
)
BOTH = pytest.mark.parametrize("data", [DATA, OLD_DATA], ids=["schema 2", "schema 1"])


@BOTH
@given(key=KEYS)
@QUICK
def test_metadata_dropped(data, key):
    dropped = edit_metadata(data, **{key: None})
    if key in split(data)[0]["__metadata__"]:
        assert is_refused_or_equal(dropped) or key == "runtime_names"
    else:
        assert not is_refused_or_equal(dropped)


@BOTH
@given(key=KEYS, text=st.text(max_size=20) | st.from_regex(r"[0-9.,e+-]{1,6}", fullmatch=True))
@QUICK
def test_metadata_changed(data, key, text):
    is_refused_or_equal(edit_metadata(data, **{key: text}))


@BOTH
@given(key=st.text(max_size=20), text=st.text(max_size=20))
@QUICK
def test_metadata_added(data, key, text):
    is_refused_or_equal(edit_metadata(data, **{key: text}))


@BOTH
@given(key=KEYS, value=JSON)
@QUICK
def test_metadata_of_another_type(data, key, value):
    header, tensors = split(data)
    header["__metadata__"][key] = value
    is_refused_or_equal(join(header, tensors))


@BOTH
@given(value=JSON, key=NAMES | st.just("__metadata__"))
@QUICK
def test_a_header_entry_replaced(data, value, key):
    header, tensors = split(data)
    header[key] = value
    is_refused_or_equal(join(header, tensors))


@BOTH
@given(value=JSON)
@QUICK
def test_the_header_replaced(data, value):
    assert is_refused_or_equal(join(value, split(data)[1]))


@BOTH
@given(name=NAMES)
@QUICK
def test_a_tensor_dropped_from_the_header(data, name):
    header, tensors = split(data)
    if header.pop(name, None):
        assert is_refused_or_equal(join(header, tensors))


@BOTH
@given(name=NAMES, other=NAMES | st.text(st.characters(), max_size=24) | st.just("a\ud800"))
@QUICK
def test_a_tensor_renamed(data, name, other):
    header, tensors = split(data)
    if name in header and name != other:
        header[other] = header.pop(name)
        assert is_refused_or_equal(join(header, tensors))


@BOTH
@given(a=NAMES, b=NAMES)
@QUICK
def test_two_tensors_exchanged(data, a, b):
    header, tensors = split(data)
    if a in header and b in header:
        header[a], header[b] = header[b], header[a]
        if a != b and data is DATA:
            assert is_refused_or_equal(join(header, tensors))


@BOTH
@given(
    name=NAMES,
    field=st.sampled_from(["dtype", "shape", "data_offsets"]),
    value=JSON
    | st.sampled_from(["F16", "BF16", "F64", "I32", "F8_E4M3", "f32"])
    | st.lists(st.sampled_from([-1, 0, 1, 2, 3, 5, 6, 7, 24, 48, 2**31, 2**62, 2**64]), max_size=3),
)
@QUICK
def test_a_tensor_reshaped_or_of_another_dtype(data, name, field, value):
    header, tensors = split(data)
    if name in header and header[name][field] != value:
        header[name][field] = value
        assert is_refused_or_equal(join(header, tensors))


@given(
    name=NAMES,
    values=st.lists(st.floats(width=32), min_size=6, max_size=6),
    rehash=st.booleans(),
)
@QUICK
def test_values_replaced(name, values, rehash):
    array = np.array(values, np.float32)
    changed = builders.edit_tensors(DATA, rehash=rehash, **{name.replace(".", "__"): array})
    # A writer that fits the hash must fit the maxima too.
    assert is_refused_or_equal(changed)


@given(length=st.integers(0, 2**64 - 1))
@QUICK
def test_the_header_length_replaced(length):
    if length != HEADER_END - 8:
        assert is_refused_or_equal(struct.pack("<Q", length) + DATA[8:])


@given(junk=st.binary(max_size=200))
@QUICK
def test_junk(junk):
    assert is_refused_or_equal(junk)
    assert is_refused_or_equal(struct.pack("<Q", len(junk)) + junk)


# Shards.


def says_what_the_json_says(text: bytes) -> None:
    try:
        shard = RankShard.from_json(text)
    except ScaleArtifactError as error:
        assert error.problems and "\n" not in str(error)
        return
    made, given_ = json.loads(shard.to_json()), json.loads(text)
    assert made["layers"].keys() == given_["layers"].keys()
    for key, value in made.items():
        if key != "layers":
            assert value == given_[key] and type(given_[key]) in (type(value), int)
    for index, layer in made["layers"].items():
        for key, value in layer.items():
            if key == "runtime_name":
                assert value == given_["layers"][index][key]
            else:
                numbers = given_["layers"][index][key]
                np.testing.assert_array_equal(value, np.array(numbers, np.float32))
                assert min(value) > 0 and max(value) < float("inf")


def shard_document() -> dict:
    return json.loads(SHARD.to_json())


def test_bits_of_every_byte_of_a_shard_flipped():
    data = json.dumps(shard_document()).encode()
    rng = random.Random(0)
    for position in range(len(data)):
        for bit in rng.sample(range(8), 3):
            changed = bytearray(data)
            changed[position] ^= 1 << bit
            says_what_the_json_says(bytes(changed))


@given(key=st.sampled_from(sorted(shard_document())), value=JSON)
@QUICK
def test_a_shards_value_replaced(key, value):
    says_what_the_json_says(json.dumps(shard_document() | {key: value}).encode())


@given(
    key=st.sampled_from(["runtime_name", "q_amax", "k_amax", "v_amax"]),
    value=JSON | st.lists(st.floats() | st.integers(-2, 10**40), min_size=2, max_size=4),
)
@QUICK
def test_a_shards_layer_changed(key, value):
    document = shard_document()
    document["layers"]["7"][key] = value
    says_what_the_json_says(json.dumps(document).encode())


@given(index=st.text(max_size=6) | st.integers().map(str), value=JSON)
@QUICK
def test_a_shards_layer_added(index, value):
    document = shard_document()
    document["layers"][index] = document["layers"]["3"] if value is None else value
    says_what_the_json_says(json.dumps(document).encode())
