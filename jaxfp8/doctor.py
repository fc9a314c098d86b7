# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""`jaxfp8 doctor`: what is installed, on which devices, and what can run there."""

from __future__ import annotations

import argparse
import collections
import importlib.metadata
import json
import platform
from typing import Any

import jaxfp8
from jaxfp8.cli import require_place_for

# Distributions to look for, and what is missing without one that is optional.
_REQUIRED = ("jax", "jaxlib", "numpy", "ml_dtypes", "safetensors")
_OPTIONAL = {
    "torch": "jaxfp8_torch, pip install 'jaxfp8[torch]'",
    "matplotlib": "jaxfp8 demo --plot, pip install 'jaxfp8[bench]'",
    "jax-rocm7-plugin": "AMD GPUs and jaxfp8 codegen, pip install 'jaxfp8[rocm]'",
    "jax-rocm7-pjrt": "the same",
    "jax-cuda12-plugin": "NVIDIA GPUs under CUDA 12, pip install 'jax[cuda12]'",
    "jax-cuda13-plugin": "NVIDIA GPUs under CUDA 13, pip install 'jax[cuda13]'",
}
_NUM_HEADS, _QK_HEAD_DIM, _V_HEAD_DIM = 12, 192, 128


def add_parser(subparsers: Any) -> None:
    """Adds the `doctor` command to what ArgumentParser.add_subparsers returned."""
    parser = subparsers.add_parser(
        "doctor",
        help="versions, devices, and which backends can run here",
        description=(
            "Reports versions, devices with the FP8 format of each, and for every attention "
            f"backend whether it can run there with head dims {_QK_HEAD_DIM}/{_V_HEAD_DIM}, and "
            "why not. Exit status 0 whatever it finds."
        ),
    )
    parser.add_argument("--json", metavar="FILE", help="write the report here, too")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Prints the report; 0.

    Raises:
      CommandError: the JSON file's path cannot be written.
    """
    from jaxfp8.scales.files import write_atomically

    require_place_for("--json", args.json)
    report = examine()
    print(_as_text(report), flush=True)
    if args.json:
        write_atomically(args.json, f"{json.dumps(report, indent=1)}\n".encode())
    return 0


def examine() -> dict[str, Any]:
    """The report, as JSON has it. Starts JAX's backends; imports neither torch nor matplotlib."""
    from jaxfp8.startup import start_jax

    versions: dict[str, str | None] = {
        "jaxfp8": jaxfp8.__version__,
        "python": platform.python_version(),
    }
    versions |= {name: _version(name) for name in (*_REQUIRED, *_OPTIONAL)}
    report: dict[str, Any] = {
        "versions": versions,
        "platform": platform.platform(),
        "devices": [],
        "backends": [],
        "messages": [],
    }
    try:
        report["messages"] = start_jax()
    except RuntimeError as error:
        report["messages"] = [str(error)]
        return report
    report["devices"] = _devices()
    for arch in dict.fromkeys(device["arch"] for device in report["devices"]):
        report["backends"] += _backends(arch)
    return report


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _devices() -> list[dict[str, Any]]:
    """The devices of JAX's default platform, alike ones together."""
    import jax

    counts = collections.Counter(
        (device.platform, device.device_kind, jaxfp8.detect_target(device))
        for device in jax.devices()
    )
    return [
        {
            "platform": platform_name,
            "kind": kind,
            "count": count,
            "arch": target.arch,
            "fp8_format": target.fp8_format.name if target.fp8_format else None,
        }
        for (platform_name, kind, target), count in counts.items()
    ]


def _backends(arch: str) -> list[dict[str, Any]]:
    """Every backend in every precision: whether it can run on a device, and why not."""
    from jaxfp8.ops.attention.base import AttentionSpec
    from jaxfp8.ops.attention.registry import (
        BACKENDS,
        choose_backend,
        get_backend,
        what_it_lacks,
        why_by_name_only,
    )
    from jaxfp8.targets import target_of_arch

    target = target_of_arch(arch)
    entries = []
    for precision in ("fp8", "bf16"):
        spec = AttentionSpec(
            precision,
            target.fp8_format if precision == "fp8" else None,
            _NUM_HEADS,
            _QK_HEAD_DIM,
            _V_HEAD_DIM,
        )
        no_format = precision == "fp8" and target.fp8_format is None
        for name in BACKENDS:
            reason = (
                f"no FP8 format is known for {arch}"
                if no_format
                else get_backend(name).unsupported(spec, target)
            )
            entries.append(
                {
                    "arch": arch,
                    "precision": precision,
                    "backend": name,
                    "available": reason is None,
                    "chosen": reason is None and choose_backend(None, spec, target).name == name,
                    "only_if_named": None if reason else why_by_name_only(name, target),
                    "lacks": None if reason else what_it_lacks(name),
                    "reason": reason,
                }
            )
    return entries


def _as_text(report: dict[str, Any]) -> str:
    lines = ["Versions"]
    for name, version in report["versions"].items():
        shown = version or f"not installed (for {_OPTIONAL.get(name, 'everything')})"
        lines.append(f"  {name:18}{shown}")
    lines += [f"  {'platform':18}{report['platform']}", "", "Devices"]
    for device in report["devices"]:
        emulated = " (emulated)" if device["arch"] == "cpu" else ""
        fmt = f"{device['fp8_format']}{emulated}" if device["fp8_format"] else "none"
        lines.append(
            f"  {device['count']} x {device['kind']}, target {device['arch']}, FP8 format {fmt}"
        )
    if not report["devices"]:
        lines.append("  none that JAX could start")
    lines += [f"  JAX says: {message}" for message in report["messages"]]
    for arch in dict.fromkeys(entry["arch"] for entry in report["backends"]):
        lines += ["", f"Backends on {arch}, head dims {_QK_HEAD_DIM}/{_V_HEAD_DIM}"]
        for entry in report["backends"]:
            if entry["arch"] != arch:
                continue
            verdict = "yes" if entry["available"] else f"no: {entry['reason']}"
            if entry["chosen"]:
                verdict = "yes, and chosen where none is named"
            elif entry["only_if_named"]:
                verdict = f"yes, if named: {entry['only_if_named']}"
            if entry["lacks"]:
                verdict += f"; {entry['lacks']}"
            lines.append(f"  {entry['backend']:18}{entry['precision']:6}{verdict}")
    return "\n".join(lines)
