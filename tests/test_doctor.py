# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""jaxfp8 doctor, with and without the things it looks for."""

import importlib.metadata
import json
import subprocess
import sys

import jax
import pytest

import jaxfp8
from jaxfp8 import doctor
from jaxfp8.cli import main
from jaxfp8.ops.attention.registry import BACKENDS


def test_report(tmp_path, capsys):
    file = tmp_path / "doctor.json"
    assert main(["doctor", "--json", str(file)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    report = json.loads(file.read_text())
    assert report["versions"]["jax"] == jax.__version__
    assert report["versions"]["jaxfp8"] == jaxfp8.__version__
    assert sum(device["count"] for device in report["devices"]) == len(jax.devices())
    assert {(entry["backend"], entry["precision"]) for entry in report["backends"]} == {
        (name, precision) for name in BACKENDS for precision in ("fp8", "bf16")
    }
    for entry in report["backends"]:
        assert entry["available"] == (entry["reason"] is None)
        assert entry["backend"] in out
        assert entry["available"] or entry["reason"] in out


@pytest.mark.parametrize(
    ("arch", "chosen"),
    [("cpu", {"xla"}), ("gfx942", {"pallas_triton"}), ("sm80", {"xla"})],
)
def test_what_is_chosen_on_a_device(arch, chosen):
    entries = doctor._backends(arch)
    assert {entry["backend"] for entry in entries if entry["chosen"]} == chosen


def test_a_device_without_fp8_says_so():
    entries = [entry for entry in doctor._backends("sm80") if entry["precision"] == "fp8"]
    assert {entry["reason"] for entry in entries} == {"no FP8 format is known for sm80"}


def test_packages_that_are_missing(monkeypatch, capsys):
    def missing(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert main(["doctor"]) == 0
    assert "not installed (for jaxfp8_torch, pip install 'jaxfp8[torch]')" in (
        capsys.readouterr().out
    )


def test_no_device_at_all(tmp_path):
    """JAX_PLATFORMS names a platform that is not there: reported, and no failure of doctor's."""
    code = (
        "import os, sys\n"
        "os.environ['JAX_PLATFORMS'] = 'nonesuch'\n"
        "from jaxfp8.cli import main\n"
        "sys.exit(main(['doctor']))"
    )
    path = ":".join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "none that JAX could start" in done.stdout
    assert "JAX says: Unable to initialize backend 'nonesuch'" in done.stdout


def test_looks_at_torch_without_importing_it(tmp_path):
    code = (
        "import sys\n"
        "from jaxfp8.doctor import examine\n"
        "examine()\n"
        "sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    )
    path = ":".join(entry for entry in sys.path if entry)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": path}, timeout=120
    )
    assert done.returncode == 0
