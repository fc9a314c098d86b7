# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""The modules that the benchmark programs share: schema, timing, batches, the float64 reference."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from tests import inputs, oracle
from tests.benchmarks.programs import imported

FIELDS = {
    "benchmark": "attention",
    "what": "attention",
    "case": "mid",
    "shape": {"tokens_q": 4, "causal": True},
    "dtype": "bf16",
    "backend": "xla",
    "device": "cpu",
    "versions": {"jax": "1"},
    "command": "python benchmarks/attention.py",
    "median_ms": 2.0,
    "quartiles_ms": (1.5, 2.5),
    "repetitions": 3,
    "bytes": 10,
    "flops": 4 * 10**9,
    "details": {"sustained_ms": 3.0},
}


@pytest.fixture
def schema():
    with imported("common.result") as module:
        yield module


def a_result(schema, **changes):
    fields = {
        **FIELDS,
        "ceiling": schema.Ceiling("bf16 matmul", 8e12, "xla"),
        "errors": (schema.Check("relative error", 0.001, 0.004),),
        "bounds": (schema.Check("ratio", 0.5, None),),
    }
    return schema.Result(**fields | changes)


def test_a_result_comes_back_from_its_line(schema):
    result = a_result(schema)
    line = result.to_json()
    assert "\n" not in line
    assert schema.from_json(line) == result
    data = json.loads(line)
    assert data["tflops"] == 2.0 and data["fraction_of_ceiling"] == 0.25
    assert data["refcheck"] == "passed" and data["ok"] is True and data["sustained_ms"] == 3.0


def test_a_bare_result_comes_back(schema):
    result = schema.Result(
        benchmark="b", what="w", device="d", versions={}, command="c", unavailable="no such kernel"
    )
    assert schema.from_json(result.to_json()) == result
    assert result.refcheck == "off" and result.ok and result.fraction_of_ceiling is None


@pytest.mark.parametrize("value", [0.005, math.nan, math.inf])
def test_a_failed_check_is_a_failed_result(schema, value):
    result = a_result(schema, errors=(schema.Check("relative error", value, 0.004),))
    assert result.refcheck == "failed" and not result.ok
    read = schema.from_json(result.to_json())  # NaN and infinity are null in JSON
    assert read.refcheck == "failed" and not read.ok


def test_copies_are_compared_by_bytes(schema):
    result = a_result(schema, ceiling=schema.Ceiling("copy", 10e3, "xla"))
    assert result.fraction_of_ceiling == pytest.approx(0.5)


def test_details_may_not_hide_a_field(schema):
    with pytest.raises(ValueError, match="details: median_ms: expected keys that are no fields"):
        a_result(schema, details={"median_ms": 1})


def test_a_file_of_results(schema, tmp_path):
    results = [a_result(schema), a_result(schema, case="late")]
    file = tmp_path / "results.jsonl"
    file.write_text("".join(result.to_json() + "\n" for result in results))
    assert schema.read(file) == results
    for line in ("{", "[]", "{}", '{"what": 1}'):
        file.write_text(f"{results[0].to_json()}\n{line}\n")
        with pytest.raises(ValueError, match=r"results\.jsonl:2: "):
            schema.read(file)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("what", 1),
        ("shape", []),
        ("shape", {"context": "long"}),
        ("versions", {"jax": 1}),
        ("median_ms", "fast"),
        ("quartiles_ms", [1.0]),
        ("repetitions", 2.5),
        ("flops", True),
        ("ceiling", {"name": "copy"}),
        ("ceiling", {"name": "copy", "per_second": 0, "by": "xla"}),
        ("errors", 3),
        ("bounds", [{"name": "ratio"}]),
        ("unavailable", []),
    ],
)
def test_a_field_of_another_type(schema, field, value):
    data = json.loads(a_result(schema).to_json()) | {field: value}
    with pytest.raises(ValueError, match=f"{field}: expected .*, got "):
        schema.from_json(json.dumps(data))


def test_bursts_take_turns():
    with imported("common.timing") as timing:
        log = []

        def subject(name):
            return timing.Subject(lambda i: log.append((name, i)), lambda _: log.append(name))

        times = timing.take_turns({"a": subject("a"), "b": subject("b")}, turns=2, least_launches=2)
    one_a, one_b = ([(name, 0), name] for name in "ab")
    burst_a, burst_b = ([(name, 0), (name, 1), name] for name in "ab")
    # Warm-up, which one launch begins; the first turn; the second, which the other begins.
    assert log == [
        *one_a, *burst_a, *one_b, *burst_b, *burst_a, *burst_b, *burst_b, *burst_a,
    ]  # fmt: skip
    assert times["a"].launches == 2 and len(times["a"].seconds) == 2
    fields = times["a"].fields
    assert fields["quartiles_ms"][0] <= fields["median_ms"] <= fields["quartiles_ms"][1]


def test_a_burst_is_as_long_as_asked(monkeypatch):
    with imported("common.timing") as timing:
        monkeypatch.setattr(timing, "burst", lambda subject, launches: 1e-3)
        assert timing.launches_for("subject", 1, 4.5e-3) == 5
        assert timing.launches_for("subject", 9, 4.5e-3) == 9
        assert timing.launches_for("subject", 2, 0.0) == 2


def test_a_slow_subject_does_not_hold_up_the_others(monkeypatch):
    with imported("common.timing") as timing:
        seconds = {"slow": 0.03, "quick": 1e-6, "slowest": 9.0}
        monkeypatch.setattr(timing, "burst", lambda subject, launches: seconds[subject])
        bursts = []
        times = timing.take_turns(
            {name: name for name in seconds}, turns=5, least_launches=3, most_seconds=0.08,
            on_burst=lambda: bursts.append(1),
        )  # fmt: skip
    assert {name: len(timing.seconds) for name, timing in times.items()} == {
        "slow": 2, "quick": 5, "slowest": 1,
    }  # fmt: skip
    assert {name: timing.launches for name, timing in times.items()} == {
        "slow": 1, "quick": 3, "slowest": 1,
    }  # fmt: skip
    assert len(bursts) == 15  # what a progress bar was told to expect


def test_quartiles_of_one_measurement():
    with imported("common.timing") as timing:
        assert timing.Timing((0.5,), 1).fields["quartiles_ms"] is None


@pytest.mark.parametrize("mix", ["single", "uniform", "ragged"])
@pytest.mark.parametrize("causal", [False, True])
def test_batches(mix, causal):
    with imported("common.inputs") as module:
        batch = module.batch(mix, 300, 1000, causal, 7)
        again = module.batch(mix, 300, 1000, causal, 7)
    assert batch == again and batch.tokens_q == 300 and batch.tokens_k == 1000
    assert len(batch.lengths_q) == len(batch.lengths_k) == (1 if mix == "single" else 7)
    if mix == "ragged" and not causal:
        assert 0 in batch.lengths_k and max(batch.lengths_k) > 2 * 1000 / 7
    if mix == "uniform":
        for lengths in (batch.lengths_q, batch.lengths_k):
            assert max(lengths) - min(lengths) <= 1
    pairs = 0
    for q, k in zip(batch.lengths_q, batch.lengths_k, strict=True):
        pairs += sum(min(max(i + 1 + k - q, 0), k) if causal else k for i in range(q))
    assert batch.pairs == pairs


def test_pairs_of_rows_that_see_nothing():
    with imported("common.inputs") as module:
        assert module.Batch((5,), (3,), True).pairs == 1 + 2 + 3
        assert module.Batch((5,), (0,), True).pairs == 0


@pytest.mark.parametrize("causal", [False, True])
def test_the_reference_is_attention(causal, monkeypatch):
    lengths_q, lengths_k = (9, 0, 40, 5), (30, 7, 20, 0)  # Lk < Lq, and one without keys
    q, k, v = inputs.qkv(np.random.default_rng(0), 54, 57, num_heads=5)
    cu_q, cu_k = inputs.cu_seqlens(lengths_q), inputs.cu_seqlens(lengths_k)
    expected = oracle.attention(q, k, v, cu_q, cu_k, causal=causal)
    with imported("common.reference") as reference:
        monkeypatch.setattr(reference, "_MOST_KEYS_AT_ONCE", 8)
        batch = reference.Batch(lengths_q, lengths_k, causal)
        sampled = reference.sample(batch, 5, rows=30, heads=3)
        assert {0, 8, 9, 48, 49, 53} <= set(sampled.rows.tolist())
        assert sampled.heads.tolist() == [0, 2, 4]
        exact = reference.exact_attention(q, k, v, batch, sampled, 192**-0.5)
        np.testing.assert_allclose(exact.out, expected.out[sampled.rows][:, sampled.heads], 1e-9)
        np.testing.assert_allclose(exact.lse, expected.lse[sampled.heads][:, sampled.rows], 1e-9)

        right = reference.compare(expected.out, expected.lse, exact, sampled, "bf16")
        assert all(check.ok and check.value < 1e-9 for check in right)
        swapped = reference.compare(expected.out[:, ::-1], expected.lse, exact, sampled, "fp8")
        assert not swapped[0].ok and swapped[1].ok
        shifted = reference.compare(expected.out, expected.lse + 0.5, exact, sampled, "fp8")
        assert shifted[0].ok and not shifted[1].ok
        seen = np.where(np.isneginf(expected.lse), 0, expected.lse)
        assert not reference.compare(expected.out, seen, exact, sampled, "fp8")[1].ok
