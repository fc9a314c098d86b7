# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""A process that torch and JAX share: memory, forks, the cache of compiled programs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")


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


SHOW = "import os; print(os.environ.get('XLA_PYTHON_CLIENT_PREALLOCATE'))"


def test_import_keeps_jax_from_reserving_the_gpu():
    assert run_python(f"import jaxfp8_torch; {SHOW}").stdout == "false\n"
    after_jax = run_python(
        "import jax, jaxfp8_torch; print(jax.config.jax_num_cpu_devices); " + SHOW
    )
    assert after_jax.stdout == "-1\nfalse\n"


def test_a_setting_of_the_users_stands():
    program = f"import jaxfp8_torch; {SHOW}"
    result = run_python(program, XLA_PYTHON_CLIENT_PREALLOCATE="true")
    assert result.stdout == "true\n"


def test_jax_that_runs_already_is_left_alone():
    result = run_python(f"import jax; jax.devices(); import jaxfp8_torch; {SHOW}")
    assert result.stdout == "None\n"
    assert "reserved" not in result.stderr  # a CPU reserves nothing


def test_jax_that_has_reserved_the_gpu_is_said_once():
    result = run_python(
        "import jax; jax.devices(); jax.default_backend = lambda: 'gpu'\n"
        "import jaxfp8_torch\n"
        "import jaxfp8_torch.runtime\n"
    )
    assert result.stderr.count("RuntimeWarning: JAX was started before jaxfp8_torch") == 1


def test_whether_jax_runs_can_be_asked():
    """And asking starts nothing, nor changes a setting."""
    result = run_python(
        "import jaxfp8_torch, jax\n"
        "print(jaxfp8_torch.jax_is_running(), jaxfp8_torch.jax_is_running())\n"
        "jax.config.update('jax_num_cpu_devices', 2)\n"
        "print(jaxfp8_torch.jax_is_running())\n"
        "print(len(jax.devices()), jaxfp8_torch.jax_is_running())\n"
    )
    assert result.stdout == "False False\nFalse\n2 True\n"


def test_import_starts_no_backend():
    run_python(
        "import jaxfp8_torch; [getattr(jaxfp8_torch, name) for name in jaxfp8_torch.__all__]",
        JAX_PLATFORMS="no_such_platform",
    )


def test_a_fork_after_a_call_is_detected():
    result = run_python(
        "import os, torch, jaxfp8_torch\n"
        "x = torch.randn(4, 2, 64)\n"
        "jaxfp8_torch.per_head_amax(x)\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    try:\n"
        "        jaxfp8_torch.per_head_amax(x)\n"
        "    except RuntimeError as error:\n"
        "        print(error, flush=True)\n"
        "    os._exit(0)\n"
        "os.waitpid(pid, 0)\n"
        "jaxfp8_torch.per_head_amax(x)\n"
    )
    assert "JAX does not survive a fork; start worker processes with the 'spawn'" in result.stdout


def test_a_fork_before_the_first_call_is_fine():
    result = run_python(
        "import os, torch, jaxfp8_torch\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    print(jaxfp8_torch.per_head_amax(torch.ones(4, 2, 64)).tolist(), flush=True)\n"
        "    os._exit(0)\n"
        "os.waitpid(pid, 0)\n"
    )
    assert result.stdout == "[1.0, 1.0]\n"


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
