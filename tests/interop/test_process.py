# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""A process that torch and JAX share: memory, forks, the cache of compiled programs."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings

import jax
import pytest

pytest.importorskip("torch")

from jaxfp8_torch import runtime


def run_python(program, **env):
    path = os.pathsep.join(entry for entry in sys.path if entry)
    # Importing jaxfp8_torch sets it, in this process too.
    inherited = {k: v for k, v in os.environ.items() if k != "XLA_PYTHON_CLIENT_PREALLOCATE"}
    result = subprocess.run(
        [sys.executable, "-W", "always", "-c", program],
        env={**inherited, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path, **env},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    return result


SHOW = "print(os.environ.get('XLA_PYTHON_CLIENT_PREALLOCATE'))\n"


# A process takes seconds to import both frameworks: each of these is asked several things.


def test_import_keeps_jax_from_reserving_the_gpu_and_starts_no_backend():
    result = run_python(
        "import os, jaxfp8_torch\n"
        f"{SHOW}"
        "[getattr(jaxfp8_torch, name) for name in jaxfp8_torch.__all__]\n",
        JAX_PLATFORMS="no_such_platform",
    )
    assert result.stdout == "false\n"


def test_after_jax_is_imported_and_before_it_runs():
    """Whether it runs can be asked, which starts nothing and changes no setting."""
    result = run_python(
        "import os, jax, jaxfp8_torch\n"
        f"{SHOW}"
        "print(jax.config.jax_num_cpu_devices)\n"
        "print(jaxfp8_torch.jax_is_running(), jaxfp8_torch.jax_is_running())\n"
        "jax.config.update('jax_num_cpu_devices', 2)\n"
        "print(jaxfp8_torch.jax_is_running())\n"
        "print(len(jax.devices()), jaxfp8_torch.jax_is_running())\n"
    )
    assert result.stdout == "false\n-1\nFalse False\nFalse\n2 True\n"


def test_a_setting_of_the_users_stands():
    result = run_python(f"import os, jaxfp8_torch\n{SHOW}", XLA_PYTHON_CLIENT_PREALLOCATE="true")
    assert result.stdout == "true\n"


def test_jax_that_runs_already_is_left_alone():
    result = run_python(f"import os, jax; jax.devices(); import jaxfp8_torch\n{SHOW}")
    assert result.stdout == "None\n"
    assert "reserved" not in result.stderr  # a CPU reserves nothing


@pytest.mark.parametrize("setting", [None, "false"])
def test_jax_that_has_reserved_the_gpu_is_said(setting, monkeypatch):
    """By the import, and a module is imported once."""
    jax.devices()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE", raising=False)
    if setting:
        monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", setting)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        runtime.share_the_gpu()
    assert [entry.category for entry in said] == ([] if setting else [RuntimeWarning])
    for entry in said:
        assert str(entry.message).startswith("JAX was started before jaxfp8_torch was imported")


def test_a_fork_after_a_call_is_detected_and_one_before_it_is_fine():
    result = run_python(
        "import os, torch, jaxfp8_torch\n"
        "x = torch.ones(4, 2, 64)\n"
        "def in_child():\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        try:\n"
        "            print(jaxfp8_torch.per_head_amax(x).tolist(), flush=True)\n"
        "        except RuntimeError as error:\n"
        "            print(error, flush=True)\n"
        "        os._exit(0)\n"
        "    os.waitpid(pid, 0)\n"
        "in_child()\n"
        "jaxfp8_torch.per_head_amax(x)\n"
        "in_child()\n"
        "print(jaxfp8_torch.per_head_amax(x).tolist())\n"
    )
    before, after, parent = result.stdout.splitlines()
    assert before == parent == "[1.0, 1.0]"
    assert "JAX does not survive a fork; start worker processes with the 'spawn'" in after


@pytest.mark.slow
def test_compiled_programs_are_kept_for_the_next_process(tmp_path):
    program = (
        "import jaxfp8_torch\n"
        "sizes = jaxfp8_torch.Buckets(query_tokens=(16,), context_tokens=(16,), sequences=(1,))\n"
        f"print(jaxfp8_torch.warmup(sizes, 1, segments=False, cache_dir={str(tmp_path)!r}))\n"
    )
    assert run_python(program).stdout == "1\n"
    kept = sorted(path.name for path in tmp_path.iterdir() if path.name.endswith("-cache"))
    assert kept
    run_python(program)
    again = sorted(path.name for path in tmp_path.iterdir() if path.name.endswith("-cache"))
    assert again == kept
