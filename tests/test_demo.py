# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""jaxfp8 demo: that it says what is so, and would say so were the attention wrong."""

import contextlib
import dataclasses
import importlib.util
import io
import json
import re
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import jaxfp8
from jaxfp8 import scales
from jaxfp8.cli import main
from jaxfp8.demo import layer as mla
from jaxfp8.demo import needles, passes, plot, text
from jaxfp8.demo.exact import error_bounds, exact_attention
from jaxfp8.demo.outcome import judge
from tests import oracle

TEXT = Path(__file__).parents[1] / "LICENSE"
CONTEXT, SEGMENT, NEW_TOKENS = 1000, 300, 96
SMALL = ["--text", str(TEXT), "--context", str(CONTEXT), "--segment", str(SEGMENT)]
SMALL += ["--new-tokens", str(NEW_TOKENS)]
HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None


def ignored():
    """For callbacks that report progress."""


@dataclasses.dataclass(frozen=True)
class Ran:
    """One run of the command: its status, what it printed, and the folder of its files."""

    status: int
    out: str
    err: str
    folder: Path

    @property
    def results(self):
        return json.loads((self.folder / "demo.json").read_text())


def run_demo(folder, *arguments):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(["demo", *SMALL, "--json", str(folder / "demo.json"), *arguments])
    return Ran(status, out.getvalue(), err.getvalue(), folder)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ran")
    plotted = ["--plot", str(folder / "error.png")] if HAS_MATPLOTLIB else []
    return run_demo(folder, "--save-dir", str(folder / "scales"), *plotted)


def test_reports_three_passes(ran):
    assert (ran.status, ran.err) == (0, "")
    bf16, dynamic, static = ran.results["passes"]
    assert [p["name"] for p in (bf16, dynamic, static)] == ["BF16", "FP8 dynamic", "FP8 static"]
    for p in (bf16, dynamic, static):
        assert 0 < p["relative_error"] <= p["relative_error_bound"]
        assert 0 < p["lse_error"] <= p["lse_error_bound"]
        assert [needle["found"] for needle in p["needles"]] == [True] * 3
        assert [needle["depth_percent"] for needle in p["needles"]] == [10, 50, 90]
        assert len(p["relative_error_by_head"]) == 12
        assert p["failures"] == []
        assert re.search(rf"^{p['name']} +{p['relative_error']:.4f} ", ran.out, re.MULTILINE)
    # Otherwise nothing was run in FP8, or the static scales were not used.
    assert dynamic["relative_error"] > 5 * bf16["relative_error"]
    assert static["relative_error"] != dynamic["relative_error"]
    # A byte a value, and a float32 a head for K and for V.
    values = SEGMENT * 12 * (192 + 128)
    assert (bf16["segment_kv_bytes"], static["segment_kv_bytes"]) == (2 * values, values + 96)

    # The static scales came from the files of 2 x 2 ranks.
    folder = ran.folder / "scales"
    assert sorted(path.name for path in folder.iterdir()) == [
        *(f"fp8-scales-pp{pp:02d}-tp{tp:02d}.json" for pp in range(2) for tp in range(2)),
        "scales.safetensors",
    ]
    artifact = scales.ScaleArtifact.read(folder / "scales.safetensors")
    assert (artifact.identity.tp_size, artifact.identity.pp_size) == (2, 2)
    assert (artifact.layers, artifact.num_heads) == ((3,), 12)
    assert dict(scales.RankShard.read(folder / "fp8-scales-pp01-tp00.json").layers) == {}


def test_again_gives_the_same(ran, tmp_path):
    def without_time(results):
        return [{**p, "seconds": None} for p in results["passes"]]

    assert without_time(run_demo(tmp_path).results) == without_time(ran.results)


def test_another_seed_draws_other_words():
    def words(seed):
        rng = np.random.default_rng(seed)
        document = needles.plant(TEXT.read_bytes(), CONTEXT, NEW_TOKENS, rng)
        return {needle.word for needle in document.needles}

    assert len(words(0) | words(1)) == 6


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="needs matplotlib")
def test_plot(ran):
    assert (ran.folder / "error.png").read_bytes().startswith(b"\x89PNG\r\n")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--context", "127"], "--context 127: expected at least 128, which hold the needles"),
        (["--segment", "0"], "--segment 0: expected at least 1"),
        (["--new-tokens", "1"], "--new-tokens 1: expected at least 96, which hold the questions"),
        (["--seed", "-1"], "--seed -1: expected at least 0"),
        (["--text", "none.txt"], "--text none.txt: cannot be read: No such file or directory"),
        (["--text", "empty.txt"], "--text empty.txt: the file is empty"),
        (["--text", "."], "--text .: cannot be read: Is a directory"),
        (
            ["--context", "20000"],
            "--context 20000: expected a text of at least 24,192 bytes (context, 96 new tokens, "
            f"4,096 to calibrate on); there are {TEXT.stat().st_size:,} in {TEXT}",
        ),
        (["--json", "none/x.json"], "--json none/x.json: there is no folder none"),
        (["--plot", "."], "--plot .: expected the path of a file, got that of a folder"),
    ],
)
def test_a_mistake_is_one_line(arguments, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").touch()
    assert main(["demo", *SMALL, *arguments]) == 2
    assert capsys.readouterr() == ("", f"jaxfp8 demo: {said}\n")


def test_a_plot_without_matplotlib_is_refused_first(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["demo", *SMALL, "--plot", str(tmp_path / "x.png")]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "needs matplotlib; pip install 'jaxfp8[bench]'" in err


def test_a_scale_folder_that_cannot_be_is_one_line(tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main(["demo", *SMALL, "--save-dir", str(tmp_path / "file")]) == 1
    err = capsys.readouterr().err
    assert (err.count("\n"), "File exists" in err) == (1, True)


def test_a_lost_needle_is_status_1(tmp_path, monkeypatch):
    """The whole command, with an attention that returns what it was given."""
    monkeypatch.setattr(jaxfp8, "attend_segment", lambda state, *args, **kwargs: state)
    lost = run_demo(tmp_path)
    assert lost.status == 1
    for name in ("BF16", "FP8 dynamic", "FP8 static"):
        for depth in (10, 50, 90):
            assert f"jaxfp8 demo: {name}: needle at {depth} % lost: planted" in lost.err
        assert f"jaxfp8 demo: {name}: relative error" in lost.err
    assert [p["needles"][0]["found"] for p in lost.results["passes"]] == [False] * 3


@dataclasses.dataclass(frozen=True)
class Scene:
    """The demo's prefill, with what it is judged by."""

    layer: mla.Layer
    hidden: np.ndarray
    prefill: passes.Prefill
    exact: object
    needles: tuple

    def judged(self, precision, static=None):
        result = passes.run_pass(self.prefill, precision, static, ignored)
        return self.judged_result(result, precision)

    def judged_result(self, result, precision):
        bounds = error_bounds(self.exact, precision)
        return judge("pass", result, 0.0, bounds, self.exact, self.layer, self.hidden, self.needles)


@pytest.fixture(scope="module")
def scene():
    rng = np.random.default_rng(7)
    document = needles.plant(TEXT.read_bytes(), CONTEXT, NEW_TOKENS, rng)
    layer = mla.seeded_layer(rng)
    hidden = layer.hidden(document.tokens)
    prefill = passes.make_prefill(layer.weights, hidden, CONTEXT, SEGMENT)
    k, v = prefill.context_and_new
    exact = exact_attention(np.asarray(prefill.q), k, v, mla.SOFTMAX_SCALE, ignored)
    return Scene(layer, hidden[CONTEXT:], prefill, exact, document.needles)


def test_the_exact_attention_is_exact(scene):
    q, (k, v) = np.asarray(scene.prefill.q), scene.prefill.context_and_new
    expected = oracle.attention(q, k, v, [0, len(q)], [0, len(k)], causal=True)
    out = scene.exact.out.transpose(1, 0, 2)
    np.testing.assert_allclose(out, expected.out, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(scene.exact.lse, expected.lse, rtol=1e-12)


def other_tokens_values(attend):
    return lambda state, k, v, cu, **scales: attend(state, k, jnp.roll(v, 1, 0), cu, **scales)


def other_heads_values(attend):
    return lambda state, k, v, cu, **scales: attend(state, k, jnp.roll(v, 1, 1), cu, **scales)


def half_of_every_segment(attend):
    return lambda state, k, v, cu, **scales: attend(state, k, v, cu // 2, **scales)


@pytest.mark.parametrize(
    "sabotage",
    [
        other_tokens_values,
        other_heads_values,
        half_of_every_segment,
    ],
)
def test_wrong_attention_loses_needles_and_passes_the_bound(sabotage, scene, monkeypatch):
    monkeypatch.setattr(jaxfp8, "attend_segment", sabotage(jaxfp8.attend_segment))
    outcome = scene.judged("fp8")
    assert outcome.num_found < 3
    assert outcome.relative_error > outcome.bounds.relative


def larger_values(attend):
    return lambda state, k, v, cu, **scales: attend(state, k, v * 1.1, cu, **scales)


def larger_keys(attend):
    return lambda state, k, v, cu, **scales: attend(state, k * 1.1, v, cu, **scales)


@pytest.mark.parametrize("sabotage", [larger_values, larger_keys])
def test_slightly_wrong_attention_passes_the_bound(sabotage, scene, monkeypatch):
    """Ten percent, where FP8 may take 6: the needles are still found, the error is not let by."""
    monkeypatch.setattr(jaxfp8, "attend_segment", sabotage(jaxfp8.attend_segment))
    outcome = scene.judged("fp8")
    assert outcome.relative_error > outcome.bounds.relative
    assert "passes the bound" in outcome.failures[-1]


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_bounds_hold_and_are_near(precision, scene):
    outcome = scene.judged(precision)
    assert outcome.failures == []
    assert outcome.bounds.relative < 4 * outcome.relative_error


def test_a_nan_and_a_wrong_lse_do_not_pass(scene):
    result = passes.run_pass(scene.prefill, "fp8", None, ignored)
    out = np.array(result.out)
    out[5, 2, 1] = np.nan
    failures = scene.judged_result(dataclasses.replace(result, out=out), "fp8").failures
    assert any(line.startswith("relative error nan") for line in failures), failures
    shifted = dataclasses.replace(result, lse=result.lse + 2)
    failures = scene.judged_result(shifted, "fp8").failures
    assert [line[:9] for line in failures] == ["LSE error"]


def test_bounds_grow_with_what_fp8_does_to_the_scores(scene):
    """Twice the score scale makes larger score errors of the same roundings, in the bound too."""
    q, (k, v) = np.asarray(scene.prefill.q), scene.prefill.context_and_new
    wide = exact_attention(q, k, v, 2 * mla.SOFTMAX_SCALE, ignored)
    np.testing.assert_allclose(
        error_bounds(wide, "fp8").lse, 2 * error_bounds(scene.exact, "fp8").lse, rtol=0.2
    )


def test_all_tokens_alike_keep_within_the_bound():
    """Then all roundings are alike, too, and nothing averages out."""
    rng = np.random.default_rng(0)
    document = needles.plant(bytes(2000), CONTEXT, NEW_TOKENS, rng)
    layer = mla.seeded_layer(rng)
    hidden = layer.hidden(document.tokens)
    prefill = passes.make_prefill(layer.weights, hidden, CONTEXT, SEGMENT)
    k, v = prefill.context_and_new
    exact = exact_attention(np.asarray(prefill.q), k, v, mla.SOFTMAX_SCALE, ignored)
    scene = Scene(layer, hidden[CONTEXT:], prefill, exact, document.needles)
    assert scene.judged("fp8").failures == []


def test_needles_are_planted_and_asked_for():
    source = TEXT.read_bytes()
    document = needles.plant(source, 2000, 150, np.random.default_rng(3))
    tokens = document.tokens.tobytes()
    assert len(tokens) == 2150
    for needle in document.needles:
        at = tokens.index(needle.word)
        assert abs(at - 2000 * needle.depth / 100) < 32
        line = tokens[tokens.rindex(b"\n", 0, at) : at]
        assert line not in source
        # The question is the same line with blanks, and is read from the token before each.
        first = tokens.index(line, at) + len(line)
        assert tokens[first : first + 8] == b"_" * 8
        assert list(needle.queries) == list(range(first - 1 - 2000, first + 7 - 2000))
    changed = np.frombuffer(tokens, np.uint8) != np.frombuffer(source[:2150], np.uint8)
    assert changed.sum() <= 6 * 32


def test_hidden_states_know_no_later_token():
    layer = mla.seeded_layer(np.random.default_rng(0))
    tokens = np.frombuffer(TEXT.read_bytes()[:200], np.uint8)
    np.testing.assert_array_equal(layer.hidden(tokens)[:77], layer.hidden(tokens[:77]))


def test_the_layer_is_shaped_like_kimi_k3s(scene):
    assert scene.prefill.q.shape == (NEW_TOKENS, 12, 192)
    assert [segment.num_tokens for segment in scene.prefill.segments] == [300, 300, 300, 100]
    for segment in scene.prefill.segments:
        assert segment.k.shape == (SEGMENT, 12, 192)
        assert segment.v.shape == (SEGMENT, 12, 128)
        # 64 channels of K are shared by the heads.
        rope = np.asarray(segment.k[:, :, 128:])
        np.testing.assert_array_equal(rope, np.broadcast_to(rope[:, :1], rope.shape))
    for x in (scene.prefill.q, scene.prefill.segments[0].k, scene.prefill.segments[0].v):
        magnitude = np.abs(np.asarray(x, np.float32)).max(axis=0)
        assert (magnitude.max(axis=1) > 3 * np.median(magnitude, axis=1)).all()


def test_without_the_repository_the_sources_are_read(tmp_path, monkeypatch):
    package = tmp_path / "site-packages" / "jaxfp8"
    (package / "ops").mkdir(parents=True)
    (package / "a.py").write_bytes(b"first")
    (package / "ops" / "b.py").write_bytes(b"second")
    monkeypatch.setattr(text, "PACKAGE", package)
    assert text.read_text(None, 1000).data == b"first\nsecond"
    assert text.read_text(None, 7).data == b"first\ns"


def test_no_more_of_a_text_is_read_than_is_wanted(tmp_path):
    file = tmp_path / "long.txt"
    with open(file, "wb") as stream:
        stream.truncate(1 << 40)
    assert text.read_text(str(file), 1000).data == bytes(1000)


@pytest.mark.skipif(not HAS_MATPLOTLIB, reason="needs matplotlib")
def test_a_plot_without_one_error_that_is_a_number(scene):
    outcome = scene.judged("bf16")
    for value in (0.0, np.nan):
        other = dataclasses.replace(outcome, error_map=np.full_like(outcome.error_map, value))
        assert plot.error_plot([other]).startswith(b"\x89PNG\r\n")
