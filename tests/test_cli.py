# SPDX-FileCopyrightText: 2026 The jaxfp8 Authors
# SPDX-License-Identifier: Apache-2.0
"""The command line itself: choosing a command, errors in one line, exit status."""

import os
import subprocess
import sys
import types

import pytest

import jaxfp8
from jaxfp8 import cli

COMMANDS = ("demo", "doctor", "scales", "codegen")


def start(*arguments, cwd, code=None, **options):
    """A fresh interpreter, in another directory, that runs the command line or some code."""
    path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry)
    return subprocess.Popen(
        [sys.executable, *(("-c", code) if code else ("-m", "jaxfp8")), *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def exit_status(arguments):
    """main's status, whether it is returned or argparse exits with it."""
    try:
        return cli.main(arguments)
    except SystemExit as stop:
        return stop.code


@pytest.fixture
def command(monkeypatch):
    """A function that puts a command of its own, `try`, on the command line."""

    def install(func):
        def add_parser(subparsers):
            subparsers.add_parser("try").set_defaults(func=func)

        monkeypatch.setitem(sys.modules, "try_cli", types.SimpleNamespace(add_parser=add_parser))
        monkeypatch.setitem(cli._COMMANDS, "try", ("try_cli", "a command"))

    return install


def test_as_a_module_from_anywhere(tmp_path):
    process = start("--version", cwd=tmp_path)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, f"jaxfp8 {jaxfp8.__version__}\n", "")


def test_help_names_every_command(capsys):
    assert exit_status(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n    {name} " in out for name in COMMANDS), out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name, capsys):
    assert exit_status([name, "--help"]) == 0
    assert f"usage: jaxfp8 {name}" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", ["--help", "demo --help", "codegen --help", "scales show x"])
def test_what_needs_no_jax_does_not_import_it(arguments, tmp_path):
    code = (
        "import sys\n"
        "from jaxfp8.cli import main\n"
        "try:\n"
        f"    main({arguments.split()})\n"
        "except SystemExit:\n"
        "    pass\n"
        "sys.exit('jax' in sys.modules)"
    )
    process = start(cwd=tmp_path, code=code)
    process.communicate(timeout=60)
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "jaxfp8: the following arguments are required: COMMAND (see jaxfp8 --help)"),
        (["--frob"], "jaxfp8: the following arguments are required: COMMAND"),
        (["frob"], "jaxfp8: argument COMMAND: invalid choice: 'frob'"),
        (["doctor", "--frob"], "jaxfp8: unrecognized arguments: --frob"),
        (["--vers"], "jaxfp8: the following arguments are required: COMMAND"),
        (["doctor", "--js", "x"], "jaxfp8: unrecognized arguments: --js x"),
        (["demo", "--cont", "8"], "jaxfp8: unrecognized arguments: --cont 8"),
        (["codegen", "--save", "x"], "jaxfp8: unrecognized arguments: --save x"),
        (["scales", "check", "x", "--tp", "2"], "jaxfp8: unrecognized arguments: --tp 2"),
        (["scales", "retarget", "x", "y", "--tp", "2"], "jaxfp8 scales retarget: the following"),
        (["demo", "--context", "many"], "jaxfp8 demo: argument --context: invalid int value"),
        (["scales"], "jaxfp8 scales: the following arguments are required: COMMAND"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(arguments, said, capsys):
    assert exit_status(arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(said)


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (cli.CommandError("no"), 2, "jaxfp8 try: no\n"),
        (cli.CommandError("no", cli.REFUSED), 1, "jaxfp8 try: no\n"),
        (OSError(28, "No space left", "out.json"), 1, "jaxfp8 try: out.json: No space left\n"),
        (OSError("no disk"), 1, "jaxfp8 try: no disk\n"),
        (KeyboardInterrupt(), 130, "jaxfp8: interrupted\n"),
    ],
)
def test_an_error_of_the_users_is_one_line(error, status, said, command, capsys):
    def run(args):
        raise error

    command(run)
    assert cli.main(["try"]) == status
    assert capsys.readouterr().err == said


def test_an_error_of_ours_shows_where_it_is(command):
    command(lambda args: {}["bug"])
    with pytest.raises(KeyError):
        cli.main(["try"])


def test_the_commands_status_is_returned(command):
    command(lambda args: 1)
    assert cli.main(["try"]) == 1


def test_a_reader_that_has_gone_is_no_traceback(tmp_path):
    process = start("doctor", cwd=tmp_path)
    process.stdout.close()
    err = process.stderr.read()
    assert (process.wait(timeout=120), err) == (1, "")


@pytest.mark.parametrize("make", [lambda p: p, lambda p: p / "none" / "x.json"])
def test_a_place_that_cannot_be_written_is_refused_first(make, tmp_path):
    with pytest.raises(cli.CommandError, match="--json .*: (expected the path|there is no folder)"):
        cli.require_place_for("--json", str(make(tmp_path)))


def test_a_place_that_can_be_written_is_accepted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for file in ("x.json", str(tmp_path / "x.json"), None):
        cli.require_place_for("--json", file)


def test_interrupted_while_a_command_is_imported(monkeypatch, capsys):
    def interrupted(name):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli.importlib, "import_module", interrupted)
    assert cli.main(["scales", "merge", "a", "b"]) == 130
    assert capsys.readouterr() == ("", "jaxfp8: interrupted\n")
