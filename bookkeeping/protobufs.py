"""Two binary logs, read without the programs that wrote them: wandb's offline runs and TensorBoard.

Both are rows of records, each with its length before it, and in each record a protobuf message: a
row of fields, each with a number and a type. A message can be read without its description if the
numbers of the few fields that are wanted are known:

    TensorBoard  events.out.tfevents.*   8 bytes length, 4 checksum, message, 4 checksum
                 Event.step = 2, .summary = 5; Summary.value = 1; Value.tag = 1, .simple_value = 2,
                 .tensor = 8; TensorProto.float_val = 5, .double_val = 6, .tensor_content = 4
                 (tensorboard 2.21.0, compat/proto/event.proto, summary.proto, tensor.proto)
    wandb        run-*.wandb             7 bytes of ":W&B" and a version, then blocks of 32 KiB;
                 4 bytes checksum, 2 length, 1 type (whole, first, middle, last), part of a message
                 Record.history = 2; HistoryRecord.item = 1, .step = 2; HistoryItem.key = 1,
                 .nested_key = 2, .integer = 5, .number = 6, .value_json = 16
                 (wandb 0.31.0, proto/wandb_internal.proto)

Why not their libraries? A person who has only the file would need tensorboard or wandb to ask what
is wrong with it, and both read a damaged file to the end or raise. Here a length that leads out of
the file ends the reading, and what came before it counts. tests/test_foreign.py writes files with
the real libraries and reads them here.

Run me: `python -m bookkeeping.protobufs FILE` prints the last values of a file; without one, an
event byte by byte.
"""

import json
import struct
import sys
import zlib
from collections.abc import Iterator

LARGEST = 1 << 20  # bytes of a record; a row of numbers has thousands. Larger ones are skipped
DEEPEST = 6  # nested_key: names within names
BLOCK = 32 * 1024  # wandb: no record's part crosses the end of a block
WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def varint(data: bytes, at: int) -> tuple[int, int]:
    """(the number that starts there, where it ends). ValueError if it does not end."""
    number = shift = 0
    while shift < 70 and at < len(data):
        byte = data[at]
        number |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return number, at
    raise ValueError("a number that does not end")


def fields(data: bytes) -> Iterator[tuple[int, object]]:
    """(number, value) of each field of a message: an int, bytes, or 4 or 8 raw bytes.

    ValueError where it is not a message.
    """
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, at = varint(data, at)
        elif kind in (1, 5):
            size = 8 if kind == 1 else 4
            value, at = data[at : at + size], at + size
        elif kind == 2:
            size, at = varint(data, at)
            value, at = data[at : at + size], at + size
        else:
            raise ValueError("an unknown kind of field")
        if at > len(data):
            raise ValueError("a field that leads out of its message")
        yield number, value


def message(data: object) -> list[tuple[int, object]]:
    """The fields of a message within a message. ValueError if it is a number."""
    if not isinstance(data, bytes):
        raise ValueError("a message is expected")
    return list(fields(data))


def text(data: object) -> str:
    return data.decode("utf-8", "replace") if isinstance(data, bytes) else ""


def unpack(form: str, data: object) -> float | None:
    """The first number of these raw bytes."""
    size = struct.calcsize(form)
    if not isinstance(data, bytes) or len(data) < size:
        return None
    return float(struct.unpack(form, data[:size])[0])


# ------------------------------------------------------------------------------------- TensorBoard


def tensorboard_rows(data: bytes) -> Iterator[dict[str, float]]:
    """{"step": …, tag: value} for each event that has scalars."""
    at = 0
    while at + 16 <= len(data):
        (size,) = struct.unpack("<Q", data[at : at + 8])
        start, at = at + 12, at + 16 + size
        if at > len(data):
            return  # cut off, or no event file any more
        if size > LARGEST:
            continue  # an image, a graph
        try:
            row = event(data[start : start + size])
        except ValueError:
            return
        if len(row) > 1:
            yield row


def event(data: bytes) -> dict[str, float]:
    row: dict[str, float] = {"step": 0.0}
    for number, value in fields(data):
        if number == 2 and isinstance(value, int):
            row["step"] = float(value)
        elif number == 5:
            for inner, scalar in message(value):
                if inner == 1:
                    row |= named_scalar(message(scalar))
    return row


def named_scalar(found: list[tuple[int, object]]) -> dict[str, float]:
    """{tag: value}, or {} if it is no scalar. A new writer puts it into a tensor of one number."""
    tag, value = "", None
    for number, content in found:
        if number == 1:
            tag = text(content)
        elif number == 2:
            value = unpack("<f", content)
        elif number == 8:
            value = tensor(message(content))
    return {} if value is None or not tag else {tag: value}


def tensor(found: list[tuple[int, object]]) -> float | None:
    for number, content in found:
        if number in (4, 5) and isinstance(content, bytes) and len(content) == 4:
            return unpack("<f", content)
        if number == 6 or (number == 4 and isinstance(content, bytes) and len(content) == 8):
            return unpack("<d", content)
    return None


# ------------------------------------------------------------------------------------------- wandb


def wandb_records(data: bytes) -> Iterator[bytes]:
    """The messages of a .wandb file, put together from their parts. A damaged one ends it."""
    at, parts, size = 7, [], 0
    while at + 7 <= len(data):
        left = BLOCK - at % BLOCK
        if left < 7:
            at += left  # padding
            continue
        checksum, length, kind = struct.unpack("<IHB", data[at : at + 7])
        if kind == 0 and length == 0:
            at += left
            continue
        part = data[at + 7 : at + 7 + length]
        at += 7 + length
        if len(part) < length or zlib.crc32(bytes([kind]) + part) != checksum:
            return
        if kind in (WHOLE, FIRST):
            parts, size = [], 0
        size += length
        if size <= LARGEST:
            parts.append(part)
        if kind in (WHOLE, LAST) and size <= LARGEST:
            yield b"".join(parts)


def wandb_rows(data: bytes) -> Iterator[dict[str, float]]:
    """{"step": …, name: value} for each call of wandb.log that had numbers."""
    for record in wandb_records(data):
        try:
            for number, value in fields(record):
                if number == 2:
                    row = history(message(value))
                    if len(row) > 1:
                        yield row
        except ValueError:
            continue


def history(found: list[tuple[int, object]]) -> dict[str, float]:
    row: dict[str, float] = {}
    for number, value in found:
        if number == 2:
            row["step"] = next((float(n) for i, n in message(value) if i == 1), 0.0)
        elif number == 1:
            row |= history_item(message(value))
    # The trainer's own count, if there is one: wandb counts calls of log.
    step = row.get("train/global_step", row.get("global_step", row.get("_step")))
    row.setdefault("step", 0.0)
    return row | ({} if step is None else {"step": step})


def history_item(found: list[tuple[int, object]]) -> dict[str, float]:
    names, value = [], None
    for number, content in found:
        if number in (1, 2) and len(names) < DEEPEST:
            names.append(text(content))
        elif number == 5 and isinstance(content, int):
            value = float((content >> 1) ^ -(content & 1))  # sint64: the sign is the last bit
        elif number == 6:
            value = unpack("<d", content)
        elif number == 16:
            value = json_number(text(content))
    return {} if value is None or not names else {"/".join(names): value}


def json_number(written: str) -> float | None:
    """A number as JSON writes it, NaN included (wandb quotes it); None for anything else."""
    try:
        value = json.loads(written) if len(written) < 100 else None
        if value in ("NaN", "Infinity", "-Infinity"):
            value = float(value)
        return (
            None if isinstance(value, bool | str | list | dict) or value is None else float(value)
        )
    except (ValueError, OverflowError, RecursionError):
        return None


def rows(data: bytes) -> Iterator[dict[str, float]]:
    """Of either kind, told by the first bytes."""
    return wandb_rows(data) if data[:4] == b":W&B" else tensorboard_rows(data)


def demo() -> None:
    """One event, put together by hand: step 7, and a scalar of 0.5 called reward."""
    scalar = b"\x0a\x06reward" + b"\x15" + struct.pack("<f", 0.5)
    summary = b"\x0a" + bytes([len(scalar)]) + scalar
    event = b"\x10\x07" + b"\x2a" + bytes([len(summary)]) + summary
    record = struct.pack("<Q", len(event)) + b"sum1" + event + b"sum2"
    print(f"{len(record)} bytes {record.hex(' ')} are", *rows(record))
    print("the same, cut off:", *rows(record[:-9]), "nothing")
    assert list(rows(record)) == [{"step": 7.0, "reward": 0.5}] and not list(rows(record[:-9]))


if __name__ == "__main__":
    for file in sys.argv[1:]:
        with open(file, "rb") as f:
            seen: dict[str, float] = {}
            for row in rows(f.read()):
                seen |= row
        print(file, *(f"{name} = {value:.4g}" for name, value in sorted(seen.items())), sep="\n  ")
    if len(sys.argv) == 1:
        demo()
