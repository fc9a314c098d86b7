# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""A Bazel test target for a pytest file."""

def pytest_test(name, src, deps = [], data = [], **kwargs):
    """Runs pytest on one file.

    Args:
      name: the target's name.
      src: the test file, a path within this package.
      deps: py_library targets.
      data: files that the tests read.
      **kwargs: passed on to py_test.
    """
    native.py_test(
        name = name,
        srcs = [src, "//bazel:pytest_main.py"],
        main = "//bazel:pytest_main.py",
        args = ["%s/%s" % (native.package_name(), src)],
        data = data + ["//:pyproject.toml", "@python_env//:packages.txt"],
        legacy_create_init = False,
        python_version = "PY3",
        deps = deps,
        **kwargs
    )
