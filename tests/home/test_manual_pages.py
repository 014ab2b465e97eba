"""Manual pages and completions say what the commands know: each option, and no other."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from machines import REPOSITORY, SCRIPTS

MAN = REPOSITORY / "dafmount" / "man"
COMPLETIONS = REPOSITORY / "dafmount" / "completions"
PAGES = sorted(MAN.glob("man*/*"))
LIMIT_S = 30

FLAG = re.compile(r"(?<![\w-])--?[A-Za-z][\w-]*")

_LINE = re.compile(r"  (?P<tag>[^\s].*?)(?:  .*)?")
"""A line of --help that names options: two blanks, the names, and what they mean after two blanks or below."""


# ---------------------------------------------------------------------------------------------------------------------
# What --help says


@pytest.fixture(scope="module", params=SCRIPTS)
def command(request: pytest.FixtureRequest) -> str:
    """Each command that is installed."""
    return str(request.param)


def help_text(command: str) -> str:
    module = SCRIPTS[command].partition(":")[0]
    done = subprocess.run(
        [sys.executable, "-m", module, "--help"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
        timeout=LIMIT_S,
    )
    return done.stdout


def tags(text: str) -> Iterator[str]:
    """What stands left of the explanations."""
    for line in text.splitlines():
        match = _LINE.fullmatch(line)
        if match:
            yield match["tag"]


def flags_known(command: str) -> set[str]:
    return {flag for tag in tags(help_text(command)) if tag.startswith("-") for flag in FLAG.findall(tag)}


def words_known() -> set[str]:
    """The words of `dafmount -o`, without their values: left of the explanations, or with a value within them."""
    _, _, words = help_text("dafmount").partition("options for -o")
    words, _, _ = words.partition("exit codes:")
    names = [name for tag in tags(words) for name in tag.split(", ")] + re.findall(r"(?<![\w-])[a-z][a-z_-]*=", words)
    return {name.partition("=")[0] for name in names if re.fullmatch(r"[a-z_][a-z_-]*(=.*)?|x-\.\.\.", name)}


def test_help_is_understood_here() -> None:
    assert {"-f", "--foreground", "-o", "--unmount", "--help"} <= flags_known("dafmount")
    assert {"cache", "layout", "uid", "gid", "ro", "_netdev", "x-..."} <= words_known()


# ---------------------------------------------------------------------------------------------------------------------
# Manual pages


def page_of(command: str) -> str:
    found = list(MAN.glob(f"man*/{command}.*"))
    assert len(found) == 1, f"the manual pages of {command}: {found}"
    return found[0].read_text()


def paragraph_tags(page: str, sections: str) -> list[str]:
    """The tags (.TP, .TQ) in the sections whose names match, as plain text."""
    found = []
    section, is_tag = "", False
    for line in page.splitlines():
        if line.startswith(".SH "):
            section = line[4:].strip('"')
        elif is_tag and re.fullmatch(sections, section):
            found.append(plain(line))
        is_tag = line in (".TP", ".TQ")
    return found


def plain(line: str) -> str:
    r"""A line of roff without macro, quotes and fonts: `.BR \-f ", " \-\-long` is `-f, --long`."""
    macro, _, text = line.partition(" ") if line.startswith(".") else ("", "", line)
    if macro in (".BR", ".BI", ".IR", ".RB", ".IB", ".RI"):
        text = "".join(quoted or bare for quoted, bare in re.findall(r'"([^"]*)"|(\S+)', text))
    return re.sub(r"\\f.", "", text).replace("\\-", "-").replace('"', "")


def test_the_page_holds_each_option_and_no_other(command: str) -> None:
    tags_there = paragraph_tags(page_of(command), ".*OPTIONS")
    found = [flag for tag in tags_there if tag.startswith("-") for flag in FLAG.findall(tag)]
    assert sorted(found) == sorted(flags_known(command))


def test_the_synopsis_shows_no_other_option(command: str) -> None:
    _, _, rest = page_of(command).partition(".SH SYNOPSIS")
    synopsis, _, _ = rest.partition(".SH ")
    shown = set(FLAG.findall(synopsis.replace("\\-", "-")))
    assert shown <= flags_known(command)


def test_the_page_holds_each_mount_option_and_no_other() -> None:
    found = [
        name.partition("=")[0]
        for tag in paragraph_tags(page_of("dafmount"), "MOUNT OPTIONS")
        for name in tag.split(", ")
    ]
    assert set(found) == words_known()


def test_the_page_holds_no_other_exit_code(command: str) -> None:
    """--help has one table for all commands, of which a page shows what its command may end with."""
    _, _, codes = help_text(command).partition("exit codes:")
    found = paragraph_tags(page_of(command), "EXIT STATUS")
    assert {"0", "2"} <= set(found) <= set(re.findall(r"^ *(\d+)  ", codes, re.MULTILINE))


def test_the_page_of_the_helper_holds_the_options_of_the_helper() -> None:
    script = (REPOSITORY / "scripts" / "mount.dafmount").read_text()
    letters = re.findall(r"getopts (\S+) ", script)[0].replace(":", "")
    found = [flag for tag in paragraph_tags(page_of("mount.dafmount"), "OPTIONS") for flag in FLAG.findall(tag)]
    assert sorted(found) == sorted(f"-{letter}" for letter in letters)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_is_well_formed(page: Path) -> None:
    """Neither of the two programs that show manual pages has anything to complain about."""
    tools = {
        "man": ["man", "--warnings", "-E", "UTF-8", "-l", "-Tutf8", "-Z"],
        "mandoc": ["mandoc", "-T", "lint", "-W", "warning"],
    }
    present = [tool for tool in tools if shutil.which(tool)]
    if not present:
        pytest.skip("neither man nor mandoc is installed")
    for tool in present:
        done = subprocess.run([*tools[tool], page], capture_output=True, text=True, check=False, timeout=LIMIT_S)
        complaints = done.stderr + (done.stdout if tool == "mandoc" else "")
        assert (done.returncode, complaints) == (0, ""), tool


def test_pages_name_only_pages_of_ours_that_exist() -> None:
    names = {page.name for page in PAGES}
    for page in PAGES:
        text = page.read_text().replace("\\-", "-")
        for name, section in re.findall(r"\b((?:mount\.)?daf\w+) \((\d)\)", text):
            assert f"{name}.{section}" in names, f"{page.name} names {name}({section})"


# ---------------------------------------------------------------------------------------------------------------------
# Completions

BASH = """
source "$1"
compopt() { :; }
COMP_LINE=$2
COMP_POINT=${#COMP_LINE}
shift 2
COMP_WORDS=("$@")
COMP_CWORD=$(($# - 1))
"_$1"
printf '%s\\n' "${COMPREPLY[@]}"
"""


def by_bash(command: str, *words: str, line: str = "") -> list[str]:
    """What bash offers, called as readline does: words are split at `=` and `:`."""
    script = COMPLETIONS / "bash" / f"{command}.bash"
    arguments = [script, line or " ".join((command, *words)), command, *words]
    return output("bash", "--norc", "-euc", BASH, "bash", *arguments)


def by_fish(command: str, line: str) -> list[str]:
    """What fish offers, without the explanations."""
    script = COMPLETIONS / "fish" / f"{command}.fish"
    found = output("fish", "--no-config", "-c", 'source $argv[1]; complete -C "$argv[2]"', script, line)
    return [offer.partition("\t")[0] for offer in found]


def output(program: str, *arguments: str | Path) -> list[str]:
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False, timeout=LIMIT_S)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_bash_offers_each_option_and_no_other(command: str) -> None:
    assert sorted(by_bash(command, "-")) == sorted(flags_known(command))


def test_fish_offers_each_option_and_no_other(command: str) -> None:
    assert sorted(by_fish(command, f"{command} -")) == sorted(flags_known(command))


def test_zsh_reads_its_completion(command: str) -> None:
    script = COMPLETIONS / "zsh" / f"_{command}"
    assert script.read_text().startswith(f"#compdef {command}\n")
    assert output("zsh", "-n", script) == []


def test_zsh_offers_each_option_and_no_other(command: str) -> None:
    text = (COMPLETIONS / "zsh" / f"_{command}").read_text()
    _, _, arguments = text.partition("_arguments ")
    found = set()
    for line in arguments.splitlines()[1:]:
        specification = re.sub(r"\[.*|'\(.*?\)'|\(.*?\)", "", line)
        found |= set(FLAG.findall(specification))
    assert sorted(found) == sorted(flags_known(command))


def test_shells_complete_mount_options() -> None:
    words = words_known() - {"x-..."}
    assert {name.rstrip("=") for name in by_bash("dafmount", "-o", "")} == words
    assert {name.partition("=")[0] for name in by_fish("dafmount", "dafmount -o ")} == words
    text = (COMPLETIONS / "zsh" / "_dafmount").read_text()
    assert set(re.findall(r"^    '([\w-]+)\[", text, re.MULTILINE)) == words


def test_bash_completes_within_a_list_of_mount_options() -> None:
    line = "dafmount -o cache=1M,lay"
    assert by_bash("dafmount", "-o", "cache", "=", "1M,lay", line=line) == ["1M,layout="]
    line = "dafmount -o cache=1M,layout=1"
    assert by_bash("dafmount", "-o", "cache", "=", "1M,layout", "=", "1", line=line) == ["1.0", "1.1"]
    assert by_bash("dafmount", "-over") == ["-overify="]
