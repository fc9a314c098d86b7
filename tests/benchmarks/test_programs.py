# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""Every benchmark program from its arguments to its exit status, on the CPU at tiny sizes."""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import subprocess

import pytest
from absl import flags

from tests.benchmarks.programs import imported, run, run_program

pytestmark = pytest.mark.usefixtures("quick_to_compile")

QUICK = ("--repetitions=2", "--launches=1", "--burst_ms=0", "--pause=0")
SHORT_CONTEXT = ("--contexts=150", "--segment=64", "--new_tokens=16", "--heads=8")
PNG = b"\x89PNG"

needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="torch is not installed"
)
needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed"
)


def by(lines, *names):
    return {tuple(line.get(name, "") for name in names): line for line in lines}


def assert_measured(lines):
    assert lines
    for line in lines:
        assert line["ok"] and line["median_ms"] > 0 and line["repetitions"] >= 1
        assert line["device"] and line["versions"]["jax"] and line["command"].startswith("python ")


@needs_matplotlib
def test_attention(tmp_path):
    plot = tmp_path / "a.png"
    result = run(
        "attention", "--tokens_q=32", "--tokens_k=64", "--causal", "--mixes=ragged",
        "--sequences=3", "--heads=2", "--peers=jax-xla", "--backends=xla", "--sustained=2",
        "--include_quantization", "--matmul_size=64", f"--plot={plot}", *QUICK,
        json_file=tmp_path / "a.jsonl",
    )  # fmt: skip
    assert result.status == 0, result.stderr
    assert_measured(result.lines)
    rows = by(result.lines, "case", "what", "dtype", "backend")
    assert len(rows) == len(result.lines) == 5
    ours = rows["32x64-causal-ragged", "attention", "float8_e4m3fnuz", "xla"]
    assert ours["refcheck"] == "passed" and 1e-3 < ours["errors"][0]["value"] < 0.08
    assert ours["shape"]["sequences"] == 3 and ours["flops"] > 0
    assert ours["sustained_ms"] > 0 and ours["fraction_of_ceiling"] > 0
    assert ours["times_best_peer"] > 0
    assert ("32x64-causal-ragged", "attention", "bf16", "jax-xla") in rows
    assert plot.read_bytes().startswith(PNG)


@needs_torch
def test_attention_beside_torch(tmp_path):
    """Peers that are installed take part without being asked for."""
    result = run(
        "attention", "--tokens_q=16", "--tokens_k=16", "--heads=1", "--precisions=bf16",
        "--mixes=single,uniform,ragged", "--sequences=2", "--noceiling", *QUICK,
        json_file=tmp_path / "a.jsonl",
    )  # fmt: skip
    assert result.status == 0, result.stderr
    rows = by(result.lines, "case", "backend")
    assert rows["16x16", "torch-sdpa"]["refcheck"] == "passed"
    assert rows["16x16", "jax-xla"]["refcheck"] == "passed"
    assert rows["16x16-uniform", "torch-sdpa"]["refcheck"] == "passed"  # as a batch of two
    # A call each for the others; one sequence has no keys.
    assert rows["16x16-ragged", "torch-sdpa"]["refcheck"] == "passed"
    assert "torch" in rows["16x16", "torch-sdpa"]["versions"]
    assert ("16x16", "torch-cudnn") not in rows


@needs_torch
def test_torch_says_why_a_kernel_does_not_serve_a_shape():
    with imported("common.peers") as peers:
        batch = peers.inputs.batch("single", 16, 16, False, 1)
        sets = peers.inputs.tensor_sets(16, 16, 1)
        with pytest.raises(NotImplementedError, match=r"^Flash attention requires .* dimension"):
            peers.torch_attention.subject("FLASH_ATTENTION", batch, sets)


@needs_torch
def test_causal_attention_behind_a_context_in_two_parts():
    import torch

    def kernel(q, k, v, bias, compute_lse, dropout, causal, debug_mask):
        scores = q @ k.transpose(2, 3) * q.shape[3] ** -0.5
        if causal:
            seen = torch.ones(scores.shape[2:], dtype=torch.bool).tril()
            scores = scores.masked_fill(~seen, -torch.inf)
        return scores.softmax(3) @ v, scores.logsumexp(3), "and more"

    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, 3, *shape, generator=generator) for shape in ((5, 8), (12, 8), (12, 4))
    )
    with imported("common.torch_attention") as module:
        out = module.behind_a_context(kernel, q, k, v)()
    mask = torch.ones(5, 12, dtype=torch.bool).tril(12 - 5)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    torch.testing.assert_close(out, expected)


def test_a_peer_that_does_not_serve_the_shape_says_so(tmp_path, monkeypatch):
    def make(batch, sets):
        raise NotImplementedError("it serves one sequence a call")

    with imported("attention") as attention:
        peer = attention.peers.Peer("jax-xla", lambda: None, make)
        monkeypatch.setitem(attention.peers._PEERS, "jax-xla", peer)
        result = run_program(
            attention, "--tokens_q=16", "--tokens_k=16", "--heads=1", "--peers=jax-xla",
            "--backends=", "--noceiling", *QUICK, json_file=tmp_path / "a.jsonl",
        )  # fmt: skip
    assert result.lines[0]["unavailable"] == "it serves one sequence a call"
    assert result.status == 1 and "nothing was measured" in result.stderr


def test_a_backend_that_fails_does_not_stop_the_others(tmp_path, monkeypatch):
    with imported("attention") as attention:
        plain = attention._attention

        def failing(batch, sets, precision, backend):
            if precision == "fp8":
                raise RuntimeError("out of registers\nand more")
            return plain(batch, sets, precision, backend)

        monkeypatch.setattr(attention, "_attention", failing)
        result = run_program(
            attention, "--tokens_q=16", "--tokens_k=16", "--heads=1", "--peers=", "--noceiling",
            *QUICK, json_file=tmp_path / "a.jsonl",
        )  # fmt: skip
    assert result.status == 1
    assert "float8_e4m3fnuz xla: RuntimeError: out of registers\n" in result.stderr
    failed, measured = result.lines
    assert failed["unavailable"] == "RuntimeError: out of registers" and not failed["ok"]
    assert measured["dtype"] == "bf16" and measured["median_ms"] > 0 and measured["ok"]


def test_a_case_without_room_does_not_stop_the_others(tmp_path, monkeypatch):
    with imported("attention") as attention:
        plain = attention.inputs.tensor_sets

        def failing(tokens_q, tokens_k, heads):
            if tokens_k == 4096:
                raise RuntimeError("out of memory")
            return plain(16, 16, heads)

        monkeypatch.setattr(attention.inputs, "tensor_sets", failing)
        monkeypatch.setattr(attention, "_CASES", {"early": (16, 4096, True), "mid": (16, 16, True)})
        result = run_program(
            attention, "--cases=early,mid-uniform,mid", "--heads=1", "--peers=", "--noceiling",
            "--precisions=bf16", "--sequences=2", *QUICK, json_file=tmp_path / "a.jsonl",
        )  # fmt: skip
    assert result.status == 1 and "early: RuntimeError: out of memory" in result.stderr
    assert [line["case"] for line in result.lines] == ["early", "mid-uniform", "mid"]
    assert [line["shape"].get("sequences") for line in result.lines] == [None, 2, 1]
    assert result.lines[1]["median_ms"] > 0


def test_nothing_to_measure_is_exit_status_1():
    result = run(
        "attention", "--backends=", "--peers=", "--noceiling", "--tokens_q=8", "--tokens_k=8"
    )
    assert result.status == 1 and result.stderr == "attention: nothing was measured\n"


def test_a_wrong_result_is_exit_status_1(monkeypatch):
    with imported("attention") as attention:
        monkeypatch.setattr(attention.reference, "out_limit", lambda precision, norm: 1e-6)
        result = run_program(
            attention, "--tokens_q=16", "--tokens_k=16", "--heads=1", "--peers=",
            "--precisions=bf16", "--noceiling", *QUICK,
        )  # fmt: skip
    assert result.status == 1
    assert "attention 16x16 bf16 xla: relative error: expected at most 1e-06" in result.stderr
    assert "FAILED" in result.stdout


@pytest.mark.parametrize(
    ("name", "argument", "message"),
    [
        ("attention", "--cases=mid,huge", "--cases: huge: expected early, mid, late, 16k"),
        ("attention", "--mixes=odd", "--mixes: odd: expected single, uniform, ragged"),
        ("attention", "--backends=cuda", "--backends: cuda: expected xla, pallas_triton"),
        ("attention", "--backends=pallas_mosaic_gpu", "pallas_mosaic_gpu cannot serve fp8: "),
        ("attention", "--peers=aiter", "--peers: aiter: expected torch-cudnn"),
        ("attention", "--peers=jax-cudnn", "--peers: jax-cudnn cannot run here: it needs an NVI"),
        ("attention", "--precisions=int8", "--precisions: int8: expected fp8, bf16"),
        ("attention", "--tokens_q=3", "--tokens_q and --tokens_k: expected both or none"),
        ("attention", "extra", "unexpected arguments: extra"),
        ("attention", "--json=/no/such/folder/a.jsonl", "there is no folder"),
        ("quantize", "--kinds=odd", "--kinds: odd: expected static, dynamic, assembled"),
        ("quantize", "--peers=aiter", "--peers: aiter: expected xla-plain, torch-compile"),
        ("quantize", "--tokens=-1", "--tokens: -1: expected a number of tokens"),
        ("context_pass", "--levels=deep", "--levels: deep: expected attention, layer"),
        ("context_pass", "--contexts=0", "--contexts: 0: expected a number of tokens"),
        ("context_pass", "--backends=cuda", "--backends: cuda: expected xla"),
        ("attention", "--cases=", "--cases: expected at least one of early, mid, late, 16k"),
        ("attention", "--mixes=", "--mixes: expected at least one of single"),
        ("attention", "--precisions=", "--precisions: expected at least one of fp8, bf16"),
        ("quantize", "--tokens=", "--tokens: expected at least one number of tokens, got none"),
        ("quantize", "--kinds=", "--kinds: expected at least one of static"),
        ("context_pass", "--contexts=", "--contexts: expected at least one number of tokens"),
        ("context_pass", "--ways=", "--ways: expected at least one of bf16"),
        (
            "context_pass",
            "--ways=bf16,fp8-dynamic --max_time_of_bf16=0.1",
            "--max_time_of_bf16: expected fp8-static among --ways",
        ),
        (
            "context_pass",
            "--ways=bf16,fp8-static --max_time_of_dynamic=1",
            "--max_time_of_dynamic: expected fp8-dynamic and fp8-static among --ways",
        ),
        ("needle", "--levels=", "--levels: expected at least one of attention"),
        ("needle", "--depths=", "--depths: expected 1 to 64 of them, got 0"),
        ("needle", f"--depths={','.join(map(str, range(65)))}", "1 to 64 of them, got 65"),
        ("needle", "--depths=50,50", "--depths: 50,50: expected a place of its own for each"),
        ("needle", "--depths=10,12 --contexts=20", "of its own for each in --contexts=20"),
        ("needle", "--levels=stack --ways=bf16", "--ways: expected one in FP8"),
        ("xla_backend", "--what=", "--what: expected at least one of bf16, causal"),
        ("gfx942_model", "--cases=", "--cases: expected at least one of mid"),
        ("needle", "--levels=deep", "--levels: deep: expected attention, layer, stack"),
        ("needle", "--depths=101", "--depths: 101: expected a number from 0 to 100"),
        ("needle", "--new_tokens=2", "--new_tokens: expected at least one for each of --depths"),
        ("needle", "--backend=cuda", "--backend: cuda: expected xla"),
        ("scales", "--tp_size=7", "--tp_size: expected a divisor of --heads=96, got 7"),
        ("tune", "--precision=fp8", "the kernel cannot run here: "),
        ("xla_backend", "--what=odd", "--what: odd: expected bf16, causal, memory, import"),
        ("gfx942_model", "--cases=large", "--cases: large: expected mid, mid_causal, 4k"),
    ],
)
def test_a_mistake_is_one_line(name, argument, message):
    result = run(name, *argument.split())
    assert result.status == 2
    assert result.stderr.startswith(f"{name}: ") and message in result.stderr
    assert result.stderr.count("\n") == 1 and result.stdout == ""


def test_a_peer_by_name_that_is_not_installed(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", functools.partial(_without_torch, found))
    for name, peer in (("attention", "torch-sdpa"), ("quantize", "torch-compile")):
        result = run(name, f"--peers={peer}")
        assert result.status == 2
        assert f"--peers: {peer} cannot run here: torch is not installed" in result.stderr
    assert run("bridge_overhead").status == 1


def _without_torch(found, name, *rest):
    return None if name == "torch" else found(name, *rest)


def test_quantize(tmp_path):
    torch = ["torch-eager"] if importlib.util.find_spec("torch") else []
    result = run(
        "quantize", "--tokens=64", "--heads=2", "--backends=xla", "--copy_mb=1",
        f"--peers={','.join(['xla-plain', *torch])}", *QUICK, json_file=tmp_path / "q.jsonl",
    )  # fmt: skip
    assert result.status == 0, result.stderr
    assert_measured(result.lines)
    rows = by(result.lines, "what", "backend")
    assert len(rows) == 3 * (2 + len(torch))
    elements = 64 * 2 * 320
    assert rows["quantize static", "xla"]["bytes"] == 3 * elements
    assert rows["quantize dynamic", "xla-plain"]["bytes"] == 5 * elements
    assert rows["quantize assembled", "xla"]["bytes"] == 2 * 64 * (2 * 256 + 64) + elements
    assert all(row["ceiling"]["name"] == "copy" for row in rows.values())
    assert all(row["refcheck"] == "passed" for row in rows.values())


@pytest.mark.slow
def test_context_pass(tmp_path):
    result = run(
        "context_pass", "--contexts=100,160", "--segment=64", "--new_tokens=16", "--heads=1",
        "--small", "--repeats=2", "--burst_ms=0", "--ways=fp8-static", "--max_time_of_bf16=1e-9",
        json_file=tmp_path / "c.jsonl",
    )  # fmt: skip
    assert result.status == 1
    assert "fp8-static float8_e4m3fnuz static xla: time over that of BF16: exp" in result.stderr
    rows = by(result.lines, "what", "case")
    passes = [line for line in result.lines if line["what"].endswith("pass")]
    assert len(passes) == 2 * 2 * 2  # BF16 takes part unasked
    assert {line["shape"]["context"] for line in passes} == {100, 160}
    assert all(line["median_ms"] > 0 and line["repetitions"] == 2 for line in passes)
    assert rows["attention pass", "bf16"]["refcheck"] == "passed"
    static = rows["layer pass", "fp8-static"]
    assert static["refcheck"] == "passed" and static["times_bf16"] > 0
    bounds = {bound["name"]: bound for line in passes for bound in line["bounds"]}
    assert bounds["time over that of BF16"]["limit"] == 1e-9
    for line in passes:
        found = {bound["name"]: bound["value"] for bound in line["bounds"]}
        assert found["seconds of the first call"] > 0
        # Neither a segment, nor a repeat, nor a longer context compiles anything.
        assert found["programs compiled later"] == 0
        assert (line["programs_of_first_call"] > 0) == (line["shape"]["context"] == 100)
    parts = {what for what, _ in rows if what.startswith("segment: ")}
    assert parts == {
        f"segment: {x}" for x in ("up-projection", "quantization", "attention", "merge")
    }
    shares = [rows[what, "fp8-static"]["share"] for what in parts]
    assert math.isclose(sum(shares), 1)


@pytest.mark.slow
def test_needles(tmp_path):
    # The shapes of the stack are those of the layer, which has the heads of the small preset.
    result = run(
        "needle", *SHORT_CONTEXT, "--small", "--ways=fp8-static", "--layers=2",
        "--stack_context=150", "--stack_new_tokens=16", json_file=tmp_path / "n.jsonl",
    )  # fmt: skip
    assert result.status == 0, result.stderr
    rows = by(result.lines, "what", "case")
    for what in ("needles, attention", "needles, layer"):
        for case in ("bf16", "fp8-static"):
            row = rows[what, case]
            assert row["found"] == row["needles"] == 3 and row["lost_at_percent"] == []
    assert rows["needles, attention", "fp8-static"]["refcheck"] == "passed"
    growth = rows["error growth", "fp8-static"]
    assert len(growth["hidden_error_by_layer"]) == len(growth["layer_error_by_layer"]) == 2
    assert growth["refcheck"] == "passed" and min(growth["layer_error_by_layer"]) > 1e-3


def test_a_lost_needle_is_exit_status_1(monkeypatch):
    with imported("needle") as needle:
        haystack = needle.Haystack
        plain = haystack._needles

        def weaker(self):
            needles = plain(self)
            return needles.at[1].set(-needles[1])

        monkeypatch.setattr(haystack, "_needles", weaker)
        result = run_program(
            needle, *SHORT_CONTEXT, "--levels=attention", "--ways=bf16", "--norefcheck",
        )  # fmt: skip
    assert result.status == 1
    assert result.stderr.count("needles lost: expected at most 0, got 1") == 1
    assert "lost_at_percent=50" in result.stdout


@needs_torch
def test_bridge_overhead_of_no_device():
    result = run("bridge_overhead", "--device=meta")
    assert result.status == 2 and "--device: expected cpu or cuda" in result.stderr


@needs_torch
def test_bridge_overhead(tmp_path):
    result = run(
        "bridge_overhead", "--tokens=16", "--heads=1", "--calls=2", "--repetitions=2",
        "--max_overhead_us=-1e6", json_file=tmp_path / "b.jsonl",
    )  # fmt: skip
    rows = by(result.lines, "what", "case", "backend")
    assert {what for what, _, _ in rows} == {"call", "part", "registration"}
    # A bound that none can keep: of two calls the overhead is any number, a negative one too.
    assert rows["call", "", "torch"]["bounds"][0]["limit"] == -1e6
    assert result.status == 1 and "overhead_us: expected at most -1" in result.stderr


def test_scales(tmp_path):
    result = run(
        "scales", "--layers=2", "--heads=16", "--tokens=32", "--repetitions=3",
        "--max_load_ms=10000", f"--profile_dir={tmp_path / 'profile'}",
        json_file=tmp_path / "s.jsonl",
    )  # fmt: skip
    assert result.status == 0, result.stderr
    assert_measured(result.lines)
    load, observe = result.lines
    assert [bound["name"] for bound in load["bounds"]] == ["median_ms", "peak_mb"]
    assert observe["refcheck"] == "passed" and observe["bounds"][0]["name"] == "passes"
    assert any((tmp_path / "profile").rglob("*.xplane.pb"))


def test_scales_that_load_too_slowly():
    result = run(
        "scales", "--layers=1", "--heads=8", "--tokens=8", "--repetitions=3", "--max_load_ms=0"
    )
    assert result.status == 1 and "median_ms: expected at most 0" in result.stderr


def test_xla_backend(tmp_path):
    result = run(
        "xla_backend", "--what=bf16,causal", "--tokens=32", "--causal_tokens=32", "--heads=1",
        "--repetitions=1", "--max_ratio=1000", "--max_causal_ratio=1000",
        json_file=tmp_path / "x.jsonl",
    )  # fmt: skip
    assert result.status == 0, result.stderr
    assert_measured(result.lines)
    assert [line["what"] for line in result.lines] == ["bf16", "causal"]
    assert result.lines[0]["refcheck"] == "passed"


def test_xla_backend_measures_memory(tmp_path, monkeypatch):
    """The child's part in this process, then the parent's with what it said."""
    with imported("xla_backend") as module:
        flags.FLAGS(["xla_backend", "--new_tokens=16", "--keys=64", "--heads=1"])
        gigabytes = module._extra_memory()
        assert list(gigabytes) == ["bf16", "fp8"]
        child = subprocess.CompletedProcess([], 0, json.dumps({"bf16": 0.5, "fp8": 1.6}))
        monkeypatch.setattr(module.subprocess, "run", lambda *arguments, **options: child)
        result = run_program(module, "--what=memory", json_file=tmp_path / "x.jsonl")
    assert [line["dtype"] for line in result.lines] == ["bf16", "fp8"]
    assert result.status == 1 and "gigabytes: expected at most 1.5, got 1.6" in result.stderr


@needs_matplotlib
def test_report(tmp_path):
    """From result files to a table and plots."""
    with imported("common.result") as schema:
        fields = {
            "benchmark": "attention",
            "what": "attention",
            "dtype": "bf16",
            "backend": "xla",
            "device": "a device",
            "versions": {"jax": "1.2"},
            "command": "python benchmarks/attention.py --heads=1",
            "median_ms": 2.0,
            "quartiles_ms": (1.0, 3.0),
            "repetitions": 7,
        }
        ceiling = schema.Ceiling("bf16 matmul", 8e12, "xla")
        error = schema.Check("relative error", 0.5, 0.004)
        results = [
            schema.Result(**fields, case="mid", flops=4 * 10**9, ceiling=ceiling),
            schema.Result(**fields, shape={"context": 64}, errors=(error,)),
            schema.Result(**fields, shape={"context": 128}),
            schema.Result(**fields, case="a|b"),
            schema.Result(**{**fields, "median_ms": None}, unavailable="no such kernel"),
        ]
    file = tmp_path / "results.jsonl"
    file.write_text("".join(result.to_json() + "\n" for result in results))
    markdown, plots = tmp_path / "report.md", tmp_path / "plots"
    done = run("report", str(file), f"--markdown={markdown}", f"--plots={plots}")
    assert done.status == 0, done.stderr
    text = markdown.read_text()
    assert text.startswith("## attention\n") and text.count(fields["command"]) == 1
    assert "a device; jax 1.2" in text
    row = "| mid | attention | bf16 | xla | 2 | 1 to 3 | 7 | 2 TFLOP/s | 25 % of bf16 matmul |"
    assert row in text and "a\\|b" in text and "not measured: no such kernel" in text
    assert "relative error 0.5 (≤ 0.004) **FAILED**" in text
    assert {path.name for path in plots.iterdir()} == {
        "time_by_context.png", "rate_to_ceiling.png", "error_by_keys.png", "time.png",
    }  # fmt: skip
    assert all(path.read_bytes().startswith(PNG) for path in plots.iterdir())


def test_report_of_what_is_no_result(tmp_path):
    file = tmp_path / "results.jsonl"
    file.write_text("{}\n")
    binary = tmp_path / "plot.png"
    binary.write_bytes(PNG)
    for arguments, status, message in (
        ((), 2, "expected the names of result files"),
        ((str(tmp_path / "none"),), 1, "none: cannot be read: No such file or directory"),
        ((str(file),), 1, f"{file}:1: not a result: "),
        ((str(binary),), 1, f"{binary}: expected lines of JSON"),
    ):
        result = run("report", *arguments)
        assert result.status == status and message in result.stderr
        assert result.stderr.count("\n") == 1
