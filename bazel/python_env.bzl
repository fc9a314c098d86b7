# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""The Python toolchain: the interpreter of the active virtual environment, with its packages."""

_BUILD = '''
load("@bazel_tools//tools/python:toolchain.bzl", "py_runtime_pair")

exports_files(["packages.txt"], visibility = ["//visibility:public"])

py_runtime(
    name = "runtime",
    interpreter_path = "{python}",
    python_version = "PY3",
)

py_runtime_pair(
    name = "runtime_pair",
    py3_runtime = ":runtime",
)

toolchain(
    name = "toolchain",
    toolchain = ":runtime_pair",
    toolchain_type = "@bazel_tools//tools/python:toolchain_type",
)
'''

_LIST_PACKAGES = """
import importlib.metadata, sys
print(sys.version)
print("\\n".join(sorted(f"{d.name} {d.version}" for d in importlib.metadata.distributions())))
"""

def _python_env_impl(ctx):
    venv = ctx.os.environ.get("VIRTUAL_ENV")
    python = ctx.path(venv + "/bin/python3") if venv else ctx.which("python3")
    if python == None or not python.exists:
        fail("no python3 in VIRTUAL_ENV (%s) or on PATH: run `make test`, then " % venv +
             "`. .venv/bin/activate`")
    listing = ctx.execute([python, "-c", _LIST_PACKAGES])
    if listing.return_code != 0:
        fail("%s does not run: %s" % (python, listing.stderr))
    ctx.file("packages.txt", listing.stdout)
    ctx.file("BUILD.bazel", _BUILD.format(python = python))

python_env = repository_rule(
    doc = """A Python 3 toolchain, :toolchain, and the versions it has, :packages.txt.

Every test depends on packages.txt. After installing other packages into the same environment,
run `bazel sync --configure`, and tests that passed with the old ones run again.""",
    implementation = _python_env_impl,
    configure = True,
    environ = ["PATH", "VIRTUAL_ENV"],
    local = True,
)
