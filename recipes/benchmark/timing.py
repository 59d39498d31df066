"""What both benchmarks share: calls timed in alternation, a table that grows row by row, and a JSON record.

Two times that were taken one after the other, on a machine that does other things too, make a poor ratio. So ours and
the peer are called in turn, A B A B ..., and every neighbouring pair gives one ratio: what slows both cancels out.
"""

import argparse
import contextlib
import datetime
import fnmatch
import gc
import json
import math
import os
import platform
import statistics
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import timm
import torch

import affdiv_zoo

MIN_PAIRS = 5  # quartiles of fewer ratios say nothing
WARM_UP_CALLS = 3
FORMATS = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class Row:
    """One comparison: a name, and how to build it when its turn comes.

    Attributes:
        name: What ``--only`` selects by, ``setting/.../ours:peer/...``.
        build: Returns two callables to be timed (unit ``"ms"``), or two measured numbers (any other unit).
        unit: ``"ms"`` or ``"MiB"``.
    """

    name: str
    build: Callable[[], tuple[Any, Any]]
    unit: str = "ms"


def synchronize(device: torch.device) -> None:
    """Waits for the device's queue; the CPU has none."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def time_pair(
    ours: Callable[[], object],
    peer: Callable[[], object],
    *,
    seconds: float,
    repeats: int | None = None,
    device: torch.device | str = "cpu",
) -> dict[str, Any]:
    """Times two callables in alternation.

    Args:
        ours: Called without arguments.
        peer: Likewise.
        seconds: Pairs are taken for as long as this, and at least ``MIN_PAIRS``.
        repeats: Exactly this many pairs instead.
        device: Whose queue a call has to have left before it counts as done.

    Returns:
        ``ours`` and ``peer`` (median milliseconds of a call), ``ratio``, ``ratio_q1`` and ``ratio_q3`` (median and
        quartiles of the ratios of neighbouring calls), ``repeats`` (pairs), ``calls`` (per measurement: more than one
        where a single one is too short to be timed).
    """
    device = torch.device(device)

    def measure(f: Callable[[], object], calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            f()
        synchronize(device)
        return 1e3 * (time.perf_counter() - start) / calls

    longest = 0.0
    for _ in range(WARM_UP_CALLS):
        longest = max(measure(ours, 1), measure(peer, 1))  # of the last round: the first ones compile and allocate
    least = 0.2 if device.type == "cpu" else 5.0  # ms: what the clock, and the wait for a device, disappear in
    calls = max(1, math.ceil(least / longest))

    times: list[tuple[float, float]] = []
    gc.collect()
    gc.disable()
    try:
        end = time.perf_counter() + seconds
        while len(times) < (repeats or MIN_PAIRS) or (repeats is None and time.perf_counter() < end):
            times.append((measure(ours, calls), measure(peer, calls)))
    finally:
        gc.enable()
    ratios = [a / b for a, b in times]
    q1, ratio, q3 = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    a, b = (statistics.median(column) for column in zip(*times, strict=True))
    return dict(ours=a, peer=b, ratio=ratio, ratio_q1=q1, ratio_q3=q3, repeats=len(times), calls=calls)


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the description's lines, and shows defaults."""


def parser(description: str) -> argparse.ArgumentParser:
    """The options that both programs take."""
    p = argparse.ArgumentParser(description=description, formatter_class=_Formatter)
    p.add_argument("--only", nargs="+", metavar="PATTERN", help="only rows whose name contains one of these (* and ?)")
    p.add_argument("--list", action="store_true", help="print the rows' names and stop")
    p.add_argument("--json", type=Path, metavar="FILE", help="write everything there too")
    p.add_argument("--seconds", type=float, default=2.0, help=f"per row; at least {MIN_PAIRS} pairs are taken")
    p.add_argument("--repeats", type=int, metavar="N", help="exactly N pairs per row, whatever --seconds says")
    p.add_argument("--threads", type=int, metavar="N", help="CPU threads of torch; as torch chooses if left out")
    p.add_argument("--device", default="cpu", help="cpu, cuda, ...")
    p.add_argument("--dtype", choices=DTYPES, default="float32", help="of parameters and inputs")
    p.add_argument("--memory-format", choices=[*FORMATS, "both"], default="both", help="nhwc: torch.channels_last")
    p.add_argument("--compile", action="store_true", help="torch.compile both sides")
    p.add_argument("--quick", action="store_true", help="tiny sizes: to see that it runs; the times mean nothing")
    return p


def parse(p: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """Parses and checks the arguments, and sets the number of threads."""
    args = p.parse_args(argv)
    if args.quick and args.repeats is None:
        args.repeats = MIN_PAIRS
    for name, value in (("--repeats", args.repeats), ("--threads", args.threads), ("--seconds", args.seconds)):
        if value is not None and not value > 0:
            p.error(f"{name} {value}: expected a number above 0")
    if args.json and not args.json.parent.is_dir():
        p.error(f"--json {args.json}: there is no folder {args.json.parent}")
    try:
        args.device = torch.device(args.device)
        torch.empty(1, device=args.device)
    except (AssertionError, RuntimeError) as e:
        p.error(f"--device {args.device}: {str(e).partition(chr(10))[0]}")
    if args.threads:
        torch.set_num_threads(args.threads)
    return args


def formats(args: argparse.Namespace) -> Sequence[str]:
    """The memory formats asked for, by their short names."""
    return list(FORMATS) if args.memory_format == "both" else [args.memory_format]


def environment(device: torch.device) -> dict[str, Any]:
    """What the numbers depend on besides the arguments."""
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError, StopIteration):  # Linux says it in full
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": cpu,
        "cpu_count": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "platform": platform.platform(),
        "versions": {
            "affdiv_zoo": affdiv_zoo.__version__,
            "python": platform.python_version(),
            "timm": timm.__version__,
            "torch": torch.__version__,
        },
    }


def run(rows: Sequence[Row], skipped: Sequence[dict[str, str]], args: argparse.Namespace, notes: str = "") -> int:
    """Measures the selected rows, prints them as they come and writes the JSON record.

    Args:
        rows: All rows there are.
        skipped: ``{"name", "reason"}`` of what this installation cannot measure.
        args: From :func:`parser`.
        notes: Lines printed above the table.

    Returns:
        The exit status: 1 if a row failed (the others are measured all the same), 2 if no row has such a name, else 0.
    """
    if args.only:
        rows = [row for row in rows if any(fnmatch.fnmatchcase(row.name, f"*{pattern}*") for pattern in args.only)]
    if args.list or not rows:
        print("\n".join(row.name for row in rows) or f"no row is called {' or '.join(args.only)}: see --list")
        return 0 if rows else 2

    env = environment(args.device)
    plain = int | float | list | dict | None
    record: dict[str, Any] = {
        "program": Path(sys.argv[0]).name,
        "environment": env,
        "arguments": {k: v if isinstance(v, plain) else str(v) for k, v in vars(args).items()},
        "rows": [],
        "failed": [],
        "skipped": list(skipped),
        "complete": False,
    }
    print(f"{env['cpu']}, {env['threads']} threads, device {env['device']}, {args.dtype}, load {env['load_average']}")
    print(", ".join(f"{name} {version}" for name, version in env["versions"].items()), env["date"])
    print("ours, peer: median of a call. ratio: median of ours / peer over neighbouring calls, and its quartiles.")
    if args.quick:
        print("--quick: the sizes are tiny and the times mean nothing.")
    for line in (*notes.splitlines(), *(f"skipped: {s['name']}: {s['reason']}" for s in skipped)):
        print(_wrap(line))

    width = max(len(row.name) for row in rows)
    print(f"\n{'name':{width}} {'ours':>9} {'peer':>9} {'':3} {'ratio':>6} {'quartiles':>13} {'n':>4}", flush=True)
    gc.collect()
    gc.freeze()  # the collection before each row is then quick
    try:
        for row in rows:
            try:
                result = _measure(row, args)
            except (AssertionError, RuntimeError, TypeError, ValueError) as e:  # e.g. a dtype that a kernel lacks
                print(_wrap(f"{row.name} failed: {type(e).__name__}: {str(e).partition(chr(10))[0]}"), flush=True)
                record["failed"].append({"name": row.name, "error": f"{type(e).__name__}: {e}"})
                continue
            record["rows"].append(result)
            spread = f"{result['ratio_q1']:.3f}-{result['ratio_q3']:.3f}" if row.unit == "ms" else ""
            print(
                f"{row.name:{width}} {result['ours']:9.3f} {result['peer']:9.3f} {row.unit:3} {result['ratio']:6.3f} "
                f"{spread:>13} {result['repeats']:4}",
                flush=True,
            )
        record["complete"] = True
    finally:
        gc.unfreeze()
        # An interrupted run keeps what it has.
        if args.json:
            args.json.write_text(json.dumps(record, indent=1) + "\n")
    return 1 if record["failed"] else 0


def _wrap(line: str) -> str:
    """A line of any length, in 110 columns."""
    return textwrap.fill(line, 110, subsequent_indent="    ")


def _measure(row: Row, args: argparse.Namespace) -> dict[str, Any]:
    """One row's numbers."""
    torch.manual_seed(0)
    if args.compile:
        torch._dynamo.reset()  # each row compiles the same few forwards anew, and there is a limit to that
    ours, peer = row.build()
    if row.unit == "ms":
        numbers = time_pair(ours, peer, seconds=args.seconds, repeats=args.repeats, device=args.device)
    else:
        ratio = ours / peer
        numbers = dict(ours=ours, peer=peer, ratio=ratio, ratio_q1=ratio, ratio_q3=ratio, repeats=1, calls=1)
    return {"name": row.name, "unit": row.unit, **numbers}
