"""The command dafinfo: what a Daf, a property or a shard consists of."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from dafmount import __version__
from dafmount.cli import exits
from dafmount.cli.progress import size_text
from dafmount.errors import DafmountError, NotADaf

if TYPE_CHECKING:
    from dafmount.check.describe import DatasetInfo, PropertyInfo, ShardInfo

DESCRIPTION = """List the axes and properties of a Daf data set: type, shape, layout, codec, chunks, bytes stored and
flat, and how many times smaller the stored ones are.

SOURCE is a FilesDaf directory, x.daf.zip, x.dafs.zip#/group, x.dafs.zip (every group), or the file of a packed
shard. With PATHs, such as matrices/cell/gene/UMIs or vectors/cell/age.zip, show the chunk grid and the codecs of
each shard."""

_MAX_VALUE = 60


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit code."""
    arguments = make_parser().parse_args(sys.argv[1:] if argv is None else argv)
    try:
        return _info(arguments.source, arguments.paths, arguments.json)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader has seen enough
        return exits.OK
    except (DafmountError, OSError) as error:
        print(f"dafinfo: {' '.join(str(error).split())}", file=sys.stderr)
        return exits.exit_code(error)


def make_parser() -> argparse.ArgumentParser:
    """The parser; what it knows is what --help and the manual page say."""
    parser = argparse.ArgumentParser(
        prog="dafinfo",
        description=DESCRIPTION,
        epilog=exits.HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("source", metavar="SOURCE", help="what to describe")
    parser.add_argument("paths", metavar="PATH", nargs="*", help="a property, or a shard, within the data set")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--version", action="version", version=f"dafinfo {__version__}")
    return parser


def _info(source: str, paths: Sequence[str], as_json: bool) -> int:
    from dafmount.check.describe import describe, describe_paths, describe_shard_file

    if paths:
        return _print_parts(describe_paths(source, paths), as_json)
    try:
        datasets = describe(source)
    except NotADaf:
        if not os.path.isfile(source) or not os.path.getsize(source):
            raise
        return _print_parts(describe_shard_file(source), as_json)
    if as_json:
        print(json.dumps([_dataset_json(dataset) for dataset in datasets], indent=1, ensure_ascii=False))
    else:
        print("\n\n".join(_dataset_text(dataset) for dataset in datasets))
    return exits.DAMAGED if any(p.problem for dataset in datasets for p in dataset.properties) else exits.OK


def _print_parts(parts: Sequence[PropertyInfo | ShardInfo], as_json: bool) -> int:
    from dafmount.check.describe import PropertyInfo

    if as_json:
        listed = [_property_json(part) if isinstance(part, PropertyInfo) else asdict(part) for part in parts]
        print(json.dumps(listed, indent=1, ensure_ascii=False))
    else:
        texts = [_property_text(part) if isinstance(part, PropertyInfo) else _shard_text(part) for part in parts]
        print("\n\n".join(texts))
    return exits.DAMAGED if any(isinstance(part, PropertyInfo) and part.problem for part in parts) else exits.OK


# JSON.


def _dataset_json(dataset: DatasetInfo) -> dict[str, object]:
    return asdict(dataset) | {"properties": [_property_json(one) for one in dataset.properties]}


def _property_json(one: PropertyInfo) -> dict[str, object]:
    return asdict(one) | {
        "n_values": one.n_values,
        "n_chunks": one.n_chunks,
        "stored_bytes": one.stored_bytes,
        "flat_bytes": one.flat_bytes,
        "ratio": _ratio(one.flat_bytes, one.stored_bytes),
    }


def _ratio(flat_bytes: int, stored_bytes: int) -> float | None:
    return round(flat_bytes / stored_bytes, 3) if stored_bytes else None


# Tables.


def _dataset_text(dataset: DatasetInfo) -> str:
    parts = [f"{dataset.name}: FilesDaf {dataset.version[0]}.{dataset.version[1]}"]
    if dataset.axes:
        rows = [(axis.name, "?" if axis.n_entries is None else str(axis.n_entries)) for axis in dataset.axes]
        parts.append(_table(("axis", "entries"), rows, "<>"))
    if dataset.scalars:
        scalars = [
            (one.name, str(one.type), _short(json.dumps(one.value, ensure_ascii=False))) for one in dataset.scalars
        ]
        parts.append(_table(("scalar", "type", "value"), scalars, "<<<"))
    if dataset.properties:
        parts.append(_properties_text(dataset.properties))
    return "\n\n".join(parts)


def _properties_text(properties: Sequence[PropertyInfo]) -> str:
    header = ("property", "type", "shape", "layout", "codec", "chunks", "stored", "flat", "ratio")
    rows = [_property_row(one) for one in properties]
    stored, flat = sum(one.stored_bytes for one in properties), sum(one.flat_bytes for one in properties)
    chunks = sum(one.n_chunks for one in properties)
    total = ("total", "", "", "", "", _count(chunks), size_text(stored), size_text(flat), _ratio_text(flat, stored))
    problems = [f"{one.path}: {one.problem}" for one in properties if one.problem]
    return "\n".join([_table(header, [*rows, total], "<<<<<>>>>"), *problems])


def _property_row(one: PropertyInfo) -> tuple[str, ...]:
    if not one.layout:
        return (one.path, "?", "", "", "", "", "", "", "")
    layout = one.layout if one.n_values is None else f"{one.layout}, {one.n_values} values"
    known = dict.fromkeys(component.compression or "flat" for component in one.components)
    return (
        one.path,
        one.eltype,
        _shape_text(one.shape),
        layout,
        ", ".join(known),
        _count(one.n_chunks),
        size_text(one.stored_bytes),
        size_text(one.flat_bytes),
        _ratio_text(one.flat_bytes, one.stored_bytes),
    )


def _property_text(one: PropertyInfo) -> str:
    header = ("file", "type", "shape", "codec", "chunks", "stored", "flat", "ratio")
    rows = [
        (
            component.file,
            component.eltype,
            _shape_text(component.shape),
            component.compression or "flat",
            _count(component.n_chunks),
            size_text(component.stored_bytes),
            size_text(component.flat_bytes),
            _ratio_text(component.flat_bytes, component.stored_bytes),
        )
        for component in one.components
    ]
    head = f"{one.path}: {one.layout} {one.eltype}, {_shape_text(one.shape)}"
    return "\n".join([head, _table(header, rows, "<<<<>>>>"), *([one.problem] if one.problem else [])])


def _shard_text(shard: ShardInfo) -> str:
    known = [
        ("type", shard.eltype),
        ("shape", _shape_text(shard.shape) if shard.shape is not None else None),
        ("chunk shape", _shape_text(shard.chunk_shape) if shard.chunk_shape else None),
        ("chunk grid", _grid_text(shard)),
        ("compression", _compression_text(shard)),
        ("codecs", None if shard.pipeline is None else json.dumps(shard.pipeline, separators=(",", ":"))),
        ("codec.json", "as above" if shard.codec_json else "none"),
        ("Zarr index", "yes" if shard.has_index else "none"),
        ("chunk bytes", _chunk_bytes_text(shard)),
        ("shard", f"{size_text(shard.shard_bytes)}, {size_text(shard.stored_bytes)} of them chunks"),
        ("flat", None if shard.flat_bytes is None else _flat_text(shard.flat_bytes, shard.shard_bytes)),
    ]
    lines = [f"  {what + ':':13}{value}" for what, value in known if value is not None]
    return "\n".join([f"{shard.name}:", *lines])


def _grid_text(shard: ShardInfo) -> str:
    if shard.grid_shape is None:
        return f"{shard.n_chunks} chunks"
    return f"{_shape_text(shard.grid_shape)} = {shard.n_chunks} chunks"


def _compression_text(shard: ShardInfo) -> str:
    parts = [shard.compression or "unknown"]
    if shard.compression_level is not None:
        parts.append(f"level {shard.compression_level}")
    if shard.zip_method is not None:
        parts.append(f"ZIP method {shard.zip_method}")
    return ", ".join(parts)


def _chunk_bytes_text(shard: ShardInfo) -> str | None:
    if not shard.n_chunks:
        return None
    mean = shard.stored_bytes // shard.n_chunks
    return f"{shard.min_chunk_bytes} to {shard.max_chunk_bytes}, {mean} on average"


def _flat_text(flat_bytes: int, stored_bytes: int) -> str:
    return f"{size_text(flat_bytes)}, ratio {_ratio_text(flat_bytes, stored_bytes)}"


def _shape_text(shape: Iterable[int]) -> str:
    return " x ".join(map(str, shape))


def _ratio_text(flat_bytes: int, stored_bytes: int) -> str:
    return f"{flat_bytes / stored_bytes:.2f}" if stored_bytes else ""


def _count(n: int) -> str:
    return str(n) if n else ""


def _short(text: str) -> str:
    return text if len(text) <= _MAX_VALUE else text[: _MAX_VALUE - 3] + "..."


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], align: str) -> str:
    """Columns as wide as their widest cell, aligned to the left (`<`) or right (`>`)."""
    lines = [header, *rows]
    widths = [max(len(line[at]) for line in lines) for at in range(len(header))]
    return "\n".join(
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(line, align, widths, strict=True)).rstrip()
        for line in lines
    )


if __name__ == "__main__":
    sys.exit(main())
