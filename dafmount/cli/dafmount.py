"""The command dafmount: mounts, unmounts, tells how mounts are doing."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import stat
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, NamedTuple

from dafmount import __version__
from dafmount.cli import exits
from dafmount.cli.hidden import hide
from dafmount.errors import DafmountError, UsageError
from dafmount.mount import background, logs, mountpoint
from dafmount.mount.background import Outcome, Report
from dafmount.mount.notify import notify
from dafmount.options import Options, parse_options, secrets_in
from dafmount.source import http_url

if TYPE_CHECKING:
    from dafmount.mount.operations import Ownership
    from dafmount.source.resolve import Resolved

log = logging.getLogger("dafmount")

DESCRIPTION = """Mount a Daf data set, packed or flat, as plain flat files.

SOURCE is a FilesDaf directory, x.daf.zip, x.dafs.zip#/group, x.dafs.zip (every group as a folder), or a folder
that holds any of these (each as a folder under its name without .zip). Or it is the URL of one of these, except of
a folder: https://host/x.daf needs the metadata.json that FilesDaf writes; of archives only the end and what is read
are fetched."""

OPTIONS_HELP = """options for -o (comma-separated):
  cache=SIZE        memory for decoded chunks (64M, also DAF_PACKED_LOCAL_CACHE_KB; for URLs 256M, also
                    DAF_PACKED_HTTP_CACHE_KB)
  spool=DIR         where compressed ZIP entries are decoded to ($TMPDIR or /var/tmp)
  spool-size=SIZE   most bytes of such copies (4G)
  layout=1.1|1.0    version of FilesDaf that the mount shows (1.1)
  shards            show the packed shards beside the flat files
  verify=WHAT       checksums to check: off, auto, all (auto)
  timeout=SECONDS   longest wait for the source before a request fails (120); retries included
  decoders=N        threads that decode ahead of who reads on and on (as many as the processor has cores, at most 4)
  readahead=SIZE    how far the kernel reads ahead, where root mounts (1M; 0: as the kernel likes, as for URLs)
  refresh=SECONDS   how often to look whether the source changed (1; for URLs, while in use, 60; 0: only when a file
                    turns out to have changed)
  nonempty          mount over a directory that has entries
  uid=, gid=        owner and group of everything shown, as numbers (those of who mounts)
  umask=, fmask=, dmask=
                    permission bits, octal, to leave out: of everything, of files, of directories
                    (without them others may read what the source lets everybody read)
  fsname=NAME       what /proc/mounts shows as the source
  for URLs (certificates, proxies and .netrc are found as curl and requests find them):
  header-file=FILE  headers to send, one "Name: value" a line; header=Name: value is seen by others until the
                    program has hidden it; neither is sent to another host that a redirect leads to
  user=NAME         log in; the password is the first line of password-file=FILE, or DAFMOUNT_PASSWORD
  cacert=FILE       certificates to trust instead of the system's
  retries=N         how often a request is repeated after a fault that may pass (4)
  connections=N     most requests at the same time (8)
  cache-dir=DIR     keep what was fetched here, across mounts; several mounts may share it
  cache-dir-size=SIZE  most bytes kept there (10G)
  allow_other       let other users in (an ordinary user may say it if /etc/fuse.conf has user_allow_other)
  allow_root        let root in besides the mounting user
  default_permissions
                    the kernel checks permissions; always so
  auto_unmount, max_read=
                    as for every FUSE file system
  ro                implied, as are nosuid, nodev and noatime; rw is refused
  noauto, user, _netdev, x-..., comment=
                    and other words of mount(8) are accepted
"""


class _Command(NamedTuple):
    """What to mount where, and how to say what happens."""

    source: str
    mountpoint: str
    options: Options
    is_foreground: bool
    level: int
    log_file: str | None


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code."""
    background.hold_standard_streams()
    parser = make_parser()
    arguments = parser.parse_args(sys.argv[1:] if argv is None else argv)
    try:
        others = [name for name in ("unmount", "status", "list") if getattr(arguments, name)]
        if others:
            if arguments.source is not None or len(others) > 1:
                raise UsageError(f"--{others[0]} stands alone; see dafmount --help")
            if arguments.list:
                return _list(arguments.json)
            return _status(arguments.status, arguments.json) if arguments.status else _unmount(arguments.unmount)
        if arguments.json:
            raise UsageError("--json belongs to --status or --list")
        if arguments.mountpoint is None:
            raise UsageError("SOURCE and MOUNTPOINT are both needed; see dafmount --help")
        hide([*http_url.secrets_in(arguments.source), *secrets_in(arguments.options)])
        options = parse_options(arguments.options, os.environ)
        level = logging.DEBUG if arguments.verbose else logging.INFO
        log_file = os.path.abspath(arguments.log_file) if arguments.log_file else None
        command = _Command(
            arguments.source, arguments.mountpoint, options, arguments.foreground, level, log_file
        )
        return _mount(command)
    except (DafmountError, OSError) as error:
        return _fail(error)
    except KeyboardInterrupt:
        return background.EXIT_INTERRUPTED


def make_parser() -> argparse.ArgumentParser:
    """The parser; what it knows is what --help and the manual page say."""
    parser = argparse.ArgumentParser(
        prog="dafmount",
        usage="dafmount [-f] [-v] [-o OPTIONS] [--log-file FILE] SOURCE MOUNTPOINT\n"
        "       dafmount --unmount MOUNTPOINT\n"
        "       dafmount --list [--json]\n"
        "       dafmount --status DIR [--json]",
        description=DESCRIPTION,
        epilog=OPTIONS_HELP + "\n" + exits.HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("source", nargs="?", metavar="SOURCE", help="what to mount")
    parser.add_argument("mountpoint", nargs="?", metavar="MOUNTPOINT", help="an empty directory")
    parser.add_argument("-o", dest="options", action="append", default=[], metavar="OPTIONS", help="see below")
    parser.add_argument("-f", "--foreground", action="store_true", help="stay in the foreground, log to the terminal")
    parser.add_argument("-u", "--unmount", metavar="MOUNTPOINT", help="take a mount away and wait for its end")
    parser.add_argument("-l", "--list", action="store_true", help="show every dafmount mount and how it is doing")
    parser.add_argument("--status", metavar="DIR", help="show all counters of the mount that holds a directory")
    parser.add_argument("--json", action="store_true", help="with --list or --status: as JSON")
    parser.add_argument("-v", "--verbose", action="store_true", help="log more")
    parser.add_argument("--log-file", metavar="FILE", help="append the log to a file instead of the system's log")
    parser.add_argument("--version", action="version", version=f"dafmount {__version__}")
    return parser


def _unmount(path: str) -> int:
    from dafmount.mount.unmount import take_away

    problem = take_away(path)
    if problem:
        print(f"dafmount: {problem}", file=sys.stderr)
        return exits.MOUNT_POINT
    return exits.OK


def _list(as_json: bool) -> int:
    from dafmount.mount import status

    asked = status.ask_all(status.ours())
    sys.stdout.write(status.as_json(asked) if as_json else status.table(asked))
    return exits.OK


def _status(path: str, as_json: bool) -> int:
    from dafmount.mount import status

    found = status.status_of(path)
    sys.stdout.write(json.dumps(asdict(found)) + "\n" if as_json else status.text(found))
    return exits.OK


def _mount(command: _Command) -> int:
    place = mountpoint.prepare(
        command.mountpoint, nonempty=command.options.nonempty, kernel_words=command.options.kernel
    )
    command = command._replace(source=_absolute(command.source), mountpoint=place)
    if command.is_foreground:
        return _serve(command, lambda outcome: True)
    outcome = background.run(lambda report: _serve_and_report(command, report))
    if outcome.exit_code:
        print(f"dafmount: {outcome.message}", file=sys.stderr)
    return outcome.exit_code


def _absolute(source: str) -> str:
    """The source independent of the working directory, which the daemon leaves."""
    return source if "://" in source else os.path.abspath(source) + ("/" if source.endswith("#/") else "")


def _serve_and_report(command: _Command, report: Report) -> int:
    """In the daemon: errors until the mount is usable are the parent's to print."""
    try:
        return _serve(command, report)
    except (DafmountError, OSError) as error:
        if not report(Outcome(exits.exit_code(error), " ".join(str(error).split()))):
            log.error("%s", error)
        return exits.exit_code(error)


def _serve(command: _Command, report: Report) -> int:
    """Open the source, mount it, and serve until it is unmounted."""
    logs.start(command.level, log_file=command.log_file, is_foreground=command.is_foreground)
    # Only now, in the daemon: numpy, trio and the rest start threads, which do not survive a fork.
    from dafmount.daf.http_layout import ListedDaf
    from dafmount.mount.session import serve
    from dafmount.source.resolve import resolve
    from dafmount.source.spool import Spool
    from dafmount.tree.build import Style
    from dafmount.tree.cache import ChunkCache
    from dafmount.tree.decoders import Decoders, most_threads
    from dafmount.tree.live import live_tree

    options = command.options.for_source(command.source)
    spool = Spool(options.spool, options.spool_bytes)

    def open_source(source: str, is_known: bool) -> Resolved:
        return resolve(
            # A URL as it is shown lacks what lets one in; only the root is one.
            command.source if http_url.is_url(source) else source,
            spool=spool,
            verify=options.verify,
            is_known=is_known,
            http=options.http,
            list_directory=ListedDaf,
        )

    resolved = open_source(command.source, False)
    cache = ChunkCache(options.cache_bytes)
    most = most_threads()
    decoders = Decoders(cache, most if options.decoders is None else min(most, options.decoders))
    style = Style(cache, options.layout, options.shards, options.verify != "off", decoders)
    live = live_tree(resolved, open_source, style)
    live.root.children()  # a version that is not read is an error of the command, not of the first ls

    def ready() -> None:
        log.info("%s is mounted at %s", resolved.display, command.mountpoint)
        report(Outcome(exits.OK, ""))
        notify(f"READY=1\nMAINPID={os.getpid()}\nSTATUS={resolved.display} is mounted at {command.mountpoint}")

    try:
        ownership = _ownership(command.source, options)
        size = resolved.archive.stamp().size
        # A service is told to open its log anew; a program in a terminal is told that the terminal is gone.
        in_terminal = command.is_foreground and "NOTIFY_SOCKET" not in os.environ
        serve(
            live,
            command.mountpoint,
            resolved.display,
            ownership,
            size,
            cache,
            decoders,
            spool,
            options,
            ready,
            ends_on_hangup=in_terminal,
        )
    finally:
        decoders.close()
        resolved.archive.close()
    return exits.OK


def _ownership(source: str, options: Options) -> Ownership:
    """The mounting user owns all; groups and others may read what the source lets them read."""
    from dafmount.mount.operations import Ownership

    status = _status_above(source)
    gid = os.getgid() if options.gid is None else options.gid
    readable = 0o400
    if status is None or status.st_mode & stat.S_IROTH:
        readable = 0o444
    elif status.st_mode & stat.S_IRGRP and status.st_gid == gid:
        readable = 0o440
    uid = os.getuid() if options.uid is None else options.uid
    file_mode = _masked(0o444, readable, options.umask, options.fmask)
    executable_mode = _masked(0o555, readable | readable >> 2, options.umask, options.fmask)
    directory_mode = _masked(0o555, readable | readable >> 2, options.umask, options.dmask)
    return Ownership(uid, gid, file_mode, executable_mode, directory_mode)


def _masked(everything: int, unmasked: int, umask: int | None, own_mask: int | None) -> int:
    """Permission bits: those without any mask, or everything but what the more special mask takes away."""
    mask = umask if own_mask is None else own_mask
    return unmasked if mask is None else everything & ~mask


def _status_above(source: str) -> os.stat_result | None:
    """The status of the file or directory that holds a source with or without a group; None for a URL."""
    if "://" in source:
        return None
    path = source
    while path and path != "/":
        with contextlib.suppress(OSError):
            return os.stat(path)
        path = os.path.dirname(path)
    return None


def _fail(error: Exception) -> int:
    print(f"dafmount: {' '.join(str(error).split())}", file=sys.stderr)
    return exits.exit_code(error)


if __name__ == "__main__":
    sys.exit(main())
