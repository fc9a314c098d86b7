# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
import argparse
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxfp8 import scales_cli
from jaxfp8.scales import Deployment, ScaleArtifact, retarget
from tests.scales import builders

# Resolved: Bazel makes links of the files, and those are refused.
GOLDEN = Path(__file__).resolve().parent / "golden"
ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(capsys):
    """Runs `jaxfp8 scales ARGUMENTS`; returns the exit status, standard output and error."""

    def run(*arguments) -> tuple[int, str, str]:
        parser = argparse.ArgumentParser(prog="jaxfp8")
        scales_cli.add_parser(parser.add_subparsers(required=True))
        capsys.readouterr()
        try:
            parsed = parser.parse_args(["scales", *map(str, arguments)])
            status = parsed.func(parsed)
        except SystemExit as error:
            status = error.code
        out, err = capsys.readouterr()
        assert "Traceback" not in err
        assert status == 2 or err.count("\n") == (status != 0)
        return status, out, err

    return run


@pytest.fixture
def path(tmp_path) -> Path:
    path = tmp_path / "scales.safetensors"
    builders.artifact().save(path)
    return path


def test_merge(run, tmp_path):
    status, out, _ = run("merge", GOLDEN, tmp_path / "out")
    assert status == 0
    assert (tmp_path / "out").read_bytes() == builders.artifact().to_bytes()
    assert "2 layers of 6 heads, from 4 shards" in out


def test_merge_that_is_refused_leaves_what_was_there(run, tmp_path, path):
    (tmp_path / "shards").mkdir()
    builders.shard(0, 0).save(tmp_path / "shards")
    before = path.read_bytes()
    status, out, err = run("merge", tmp_path / "shards", path)
    assert (status, out) == (1, "")
    assert "3 of 4 shards missing: pp_rank 0 tp_rank 1" in err
    assert path.read_bytes() == before


@pytest.mark.parametrize("out", ["/dev/null", "/missing/folder/x", ".", ""])
def test_merge_to_where_no_file_can_be(run, out):
    status, _, err = run("merge", GOLDEN, out)
    assert status == 1 and "cannot write" in err


def test_merge_does_not_overwrite_a_shard(run, tmp_path):
    for shard in builders.shards():
        target = shard.save(tmp_path)
    before = Path(target).read_text()
    status, _, err = run("merge", tmp_path, target)
    assert status == 1 and "expected another name than that of a shard" in err
    assert Path(target).read_text() == before


def test_show(run, path):
    status, out, _ = run("show", path)
    assert status == 0
    for part in (
        "model                moonshotai/Kimi-K3",
        "tp_size              2",
        "content_sha256       " + builders.artifact().content_sha256,
        "model.layers.7.self_attn.attn",
    ):
        assert part in out
    q = builders.artifact().layer(7).q
    assert f"{q.min():.3e} / " in out and f" / {q.max():.3e}" in out


def test_show_json(run, path):
    status, out, _ = run("show", path, "--json")
    shown = json.loads(out)
    assert status == 0
    assert shown["model"] == "moonshotai/Kimi-K3" and shown["num_layers"] == 2
    q = builders.artifact().layer(7).q
    assert shown["layers"][1]["layer"] == 7
    assert shown["layers"][1]["q_descale"]["min"] == q.min()
    assert shown["layers"][1]["q_descale"]["max"] == q.max()


def test_show_schema_1(run):
    status, out, _ = run("show", GOLDEN / "schema1.safetensors")
    assert status == 0 and "schema               1" in out


def flags(deployment: Deployment) -> list[str]:
    made = []
    for field in dataclasses.fields(Deployment):
        value = getattr(deployment, field.name)
        text = ",".join(map(str, value)) if field.name == "layers" else str(value)
        made += [f"--{field.name.replace('_', '-')}", text]
    return made


def test_check_that_fits(run, path):
    deployment = builders.artifact().deployment
    status, out, _ = run("check", path, *flags(deployment))
    assert status == 0
    assert "sound, schema 2, 2 layers; fits model, revision" in out
    assert run("check", path)[0] == 0
    assert run("check", path, "--layers", "7,3")[0] == 0


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--model", "other"),
        ("--revision", "abcdef0"),
        ("--checkpoint-id", "other"),
        ("--tp-size", "8"),
        ("--pp-size", "1"),
        ("--cache-mode", "other"),
        ("--fp8-dtype", "float8_e4m3fn"),
        ("--local-heads", "12"),
        ("--qk-head-dim", "128"),
        ("--v-head-dim", "64"),
        ("--layers", "3,7,11"),
        ("--layers", "3"),
    ],
)
def test_check_that_does_not_fit(run, path, flag, value):
    status, out, err = run("check", path, flag, value)
    assert status == 1
    assert out.startswith(flag[2:].replace("-", "_") + ": ") and out.count("\n") == 1
    assert err == f"jaxfp8 scales: {str(path)!r}: refused, 1 problem\n"


def test_check_prints_every_mismatch(run, path):
    path.write_bytes(builders.edit_metadata(path.read_bytes(), num_layers="3"))
    status, out, err = run("check", path, "--tp-size", 8, "--model", "x", "--layers", "7,9")
    assert status == 1 and "refused, 5 problems" in err
    names = sorted(line.split(":")[0] for line in out.splitlines())
    assert names == ["layers", "layers", "model", "num_layers", "tp_size"]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["unknown"],
        ["check"],
        ["check", "x", "--revision", "main"],
        ["check", "x", "--tp-size", "zero"],
        ["check", "x", "--tp-size", "0"],
        ["check", "x", "--layers", "3,3"],
        ["check", "x", "--fp8-dtype", "fp8"],
        ["merge", "x"],
        ["export", "x", "y", "--fp8-dtype", "e5m2"],
        ["retarget", "x", "y"],
        ["diff", "x", "y", "--max-ratio", "0.5"],
        ["diff", "x", "y", "--max-ratio", "nan"],
    ],
)
def test_usage(run, arguments):
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert "error: " in err.splitlines()[-1]


@pytest.mark.parametrize("command", ["show", "check", "export", "retarget", "diff"])
@pytest.mark.parametrize("name", ["missing", "folder", "junk", "empty"])
def test_a_file_that_is_no_artifact(run, tmp_path, command, name):
    (tmp_path / "folder").mkdir()
    (tmp_path / "junk").write_bytes(b"junk" * 100)
    (tmp_path / "empty").write_bytes(b"")
    more = {"export": ["out"], "retarget": ["out", "--tp-size", "1"], "diff": [GOLDEN]}
    arguments = [tmp_path / a if a == "out" else a for a in more.get(command, [])]
    status, _, err = run(command, tmp_path / name, *arguments)
    assert status == 1 and str(tmp_path / name) in err
    assert not (tmp_path / "out").exists()


def test_export(run, tmp_path, path):
    status, out, _ = run("export", path, tmp_path / "out", "--fp8-dtype", "float8_e4m3fn")
    assert status == 0
    assert "6 scales, value = float8_e4m3fn number * scale" in out
    assert "calibrated for float8_e4m3fnuz (maximum 240), converted" in out
    status, out, _ = run("export", path, tmp_path / "out", "--per-tensor")
    assert status == 0 and "vLLM expects scales for float8_e4m3fn" in out
    old = GOLDEN / "schema1.safetensors"
    status, _, err = run("export", old, tmp_path / "out")
    assert status == 1 and "name_template" in err
    assert run("export", old, tmp_path / "out", "--name-template", "l.{layer}")[0] == 0


def test_an_artifact_is_not_written_over_by_what_is_made_of_it(run, tmp_path, path):
    before = path.read_bytes()
    (tmp_path / "hard link").hardlink_to(path)
    for command in (["export"], ["retarget", "--tp-size", "1"]):
        for out in (path, tmp_path / "hard link"):
            status, _, err = run(command[0], path, out, *command[1:])
            assert status == 1 and "OUT: expected another file than FILE" in err
    assert path.read_bytes() == before


def test_retarget(run, tmp_path, path):
    status, out, _ = run("retarget", path, tmp_path / "out", "--tp-size", "6")
    assert status == 0 and "tp_size 6, pp_size 2, 1 heads a rank" in out
    read = ScaleArtifact.read(tmp_path / "out")
    assert read.to_bytes() == retarget(builders.artifact(), tp_size=6).to_bytes()
    assert "calibration_tp_size  2" in run("show", tmp_path / "out")[1]
    status, _, err = run("retarget", path, tmp_path / "other", "--tp-size", "4")
    assert status == 1 and "tp_size: expected a divisor of the 6 heads" in err
    assert not (tmp_path / "other").exists()


def test_diff(run, tmp_path, path):
    other = tmp_path / "other"
    builders.artifact(calibration_id="later", margin=1.5).save(other)
    status, out, _ = run("diff", path, other)
    assert status == 0
    assert "differs: calibration_id: 'books-2026-01' and 'later'" in out
    assert "largest change: 1.3333x" in out
    assert run("diff", path, other, "--max-ratio", "1.4")[0] == 0
    status, _, err = run("diff", path, other, "--max-ratio", "1.3")
    assert status == 1 and "a descale changed by 1.3333x, more than 1.3" in err
    status, out, _ = run("diff", path, other, "--json")
    assert json.loads(out)["largest"] == pytest.approx(4 / 3)
    builders.artifact(tp_size=3).save(other)
    assert run("diff", path, other)[0] == 1


def test_a_reader_that_goes_away(path):
    program = (
        "import argparse, sys; from jaxfp8 import scales_cli; p = argparse.ArgumentParser()\n"
        "scales_cli.add_parser(p.add_subparsers()); a = p.parse_args(); sys.exit(a.func(a))"
    )
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run(
        [sys.executable, "-c", program, "scales", "show", path],
        stdout=writer,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])},
    )
    os.close(writer)
    assert (result.returncode, result.stderr) == (1, b"")
