"""The cases of the fault matrix: one row per fault, with the expected behaviour."""

from __future__ import annotations

from dataclasses import dataclass

GLOO, MPI, TORCH = "horovodrun", "mpirun", "torchrun"
LAUNCHERS = (GLOO, MPI, TORCH)
TIMEOUT = 30
"""ACCORDION_HVD_TIMEOUT of all runs, in seconds."""

DEAD, SILENT = 30.0, TIMEOUT + 10.0
"""Seconds within which every rank must know of a dead and of a silent rank."""

PAUSE = 45.0
"""Seconds for which all processes of a job are stopped: longer than any limit for silent ranks."""

STEPS, SAVED = 10, (4, 8)
"""Steps of a training, and those after which it saves a checkpoint."""

ENDS, REFUSED, GOES_ON, SKIPS, RESTORED = "ends", "refused", "goes on", "skips", "restored"
SPREADS = "spreads"
EXPECTED = {
    ENDS: "all ranks end",
    REFUSED: "all ranks raise the same error",
    GOES_ON: "training goes on, as without the fault",
    SKIPS: "all ranks skip the step",
    SPREADS: "all ranks get the value, as without compression",
    RESTORED: "training continues from the last complete checkpoint",
}


@dataclass(frozen=True)
class Case:
    """A fault that one rank meets, and what must happen.

    Attributes:
        name: name on the command line.
        title: name on the page.
        place: place of the fault, as in `Rank.at`; "settings" if the rank is set up differently,
            "files" if saved files are damaged between two launches, "" if there is none.
        action: action there, a key of `actions.ACTIONS`, or the difference or the damage.
        expected: a key of `EXPECTED`.
        says: regular expression that the errors of surviving ranks must match.
        launchers: launchers of the run in PyTorch.
        keras: launchers of the run in Keras.
        method: the compression, a key of `training.METHODS`.
        step: first step at which the fault may happen, from 0.
        rank: rank that meets the fault.
        ranks: number of ranks.
        options: variants of the training: "scaler", "join", "ddp", "fsdp", "optimizer"
            (OnebitAdam), "ledger" (written to the folder), "sink" (a sink of the ledger),
            "tracker", "metric" (an average of metrics at the end of the epoch), "others late" (the
            other ranks sleep in the step of the fault).
        resumed_on: number of ranks of a second launch that loads the checkpoint; 0: none.
        environment: further environment variables.
    """

    name: str
    title: str
    place: str
    action: str
    expected: str = ENDS
    says: str = ""
    launchers: tuple[str, ...] = LAUNCHERS
    keras: tuple[str, ...] = ()
    method: str = "topk"
    step: int = 6
    rank: int = 1
    ranks: int = 2
    options: tuple[str, ...] = ()
    resumed_on: int = 0
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def silent(self) -> bool:
        """Return whether the rank stays alive and does not answer."""
        return self.action == "stop"

    @property
    def unanswered(self) -> bool:
        """Return whether the other ranks can only learn of the fault by waiting in vain."""
        return self.silent or self.action in ("busy", "collective") or "metric" in self.options

    @property
    def limit(self) -> float:
        """Return the seconds within which every rank must have ended or gone on."""
        return SILENT if self.unanswered else DEAD + (PAUSE if self.action == "pause" else 0.0)

    def runs(self) -> list[tuple[str, str]]:
        """Return the pairs of framework and launcher in which the case is tried."""
        return [("PyTorch", x) for x in self.launchers] + [("Keras", x) for x in self.keras]


ONE = (GLOO, TORCH)  # one launcher per engine
PATIENT = (("HOROVOD_GLOO_TIMEOUT_SECONDS", "600"),)  # longer than a pause; the default is 30
PAYLOAD = "PayloadError: the payload of rank 1 does not decode|not decode; sent by ranks. .1."

# fmt: off
SECTIONS: dict[str, tuple[Case, ...]] = {
    "No fault": (
        Case("none", "no fault", "", "", GOES_ON, keras=(GLOO,)),
        Case("none-late", "a rank starts 5 s late", "start", "sleep", GOES_ON, step=0,
             launchers=(TORCH,)),
        Case("late", "a rank is 5 s late in a step", "step", "sleep", GOES_ON, launchers=ONE),
        Case("clock", "the clock of a rank is an hour ahead", "start", "clock", GOES_ON, step=0,
             launchers=(TORCH,)),
    ),
    "Dead ranks": (
        Case("kill-forward", "SIGKILL in forward", "forward", "kill", ranks=3, keras=(GLOO,)),
        Case("kill-exchange", "SIGKILL in an exchange", "exchange", "kill", ranks=3,
             keras=(GLOO,)),
        Case("kill-far", "SIGKILL in an exchange, 4 ranks", "exchange", "kill", ranks=4,
             launchers=(GLOO,)),
        Case("kill-rank-0", "SIGKILL of rank 0 in an exchange", "exchange", "kill", rank=0,
             ranks=3, launchers=(GLOO,)),
        Case("kill-decision", "SIGKILL of rank 0 in a decision", "decision", "kill", rank=0,
             method="accordion", step=5, ranks=3, launchers=ONE),
        Case("kill-checkpoint", "SIGKILL in a checkpoint", "checkpoint", "kill", step=8,
             resumed_on=2, ranks=3, launchers=ONE),
        Case("kill-average", "SIGKILL in an average, LocalSGD", "average", "kill",
             method="local", ranks=3, launchers=(GLOO,)),
        Case("kill-groups", "SIGKILL in an average, WAGMA", "average", "kill", method="wagma",
             ranks=4, launchers=(MPI,)),
        Case("exit", "a rank leaves early: sys.exit(0)", "step", "exit", ranks=3, keras=(GLOO,)),
        Case("exit-error", "a rank leaves early: sys.exit(3)", "step", "exit 3", ranks=3,
             launchers=(TORCH,)),
        Case("fewer-steps", "a rank takes fewer steps", "settings", "steps", ranks=3,
             launchers=ONE),
    ),
    "Silent ranks": (
        Case("stop-forward", "SIGSTOP in forward", "forward", "stop", ranks=3,
             keras=(GLOO, MPI)),
        Case("stop-exchange", "SIGSTOP in an exchange", "exchange", "stop", ranks=3),
        Case("stop-decision", "SIGSTOP of rank 0 in a decision", "decision", "stop", rank=0,
             method="accordion", step=5, ranks=3, launchers=(GLOO,)),
        Case("stop-checkpoint", "SIGSTOP in a checkpoint", "checkpoint", "stop", step=8,
             ranks=3, launchers=(TORCH,)),
        Case("stop-average", "SIGSTOP in an average, LocalSGD", "average", "stop",
             method="local", ranks=3, launchers=(GLOO,)),
        Case("stop-groups", "SIGSTOP in an average, WAGMA", "average", "stop", method="wagma",
             ranks=4, launchers=(MPI,)),
    ),
    "Busy ranks": (
        Case("busy-forward", "a rank is alive and does not go on, in forward", "forward", "busy",
             keras=(GLOO, MPI)),
        Case("busy-exchange", "the same in an exchange, 3 ranks", "exchange", "busy", ranks=3,
             launchers=ONE, keras=(GLOO,)),
        Case("busy-average", "the same in an average, LocalSGD", "average", "busy",
             method="local", launchers=(GLOO,)),
        Case("busy-local", "the same in forward, LocalSGD", "forward", "busy", method="local",
             launchers=(TORCH,), keras=(GLOO, MPI)),
        Case("busy-groups", "the same in an average, WAGMA", "average", "busy", method="wagma",
             ranks=4, launchers=(MPI,)),
        Case("busy-optimizer", "the same in forward, OnebitAdam", "forward", "busy",
             options=("optimizer",), step=2, launchers=ONE),
        Case("busy-ddp", "the same in forward, DistributedDataParallel", "forward", "busy",
             options=("ddp",), step=2, launchers=(TORCH,)),
        Case("busy-fsdp", "the same in forward, FSDP2", "forward", "busy", options=("fsdp",),
             step=2, launchers=(TORCH,)),
        Case("busy-decision", "the same on rank 0 in a decision", "decision", "busy", rank=0,
             method="accordion", step=5, launchers=ONE),
        Case("busy-checkpoint", "the same in a checkpoint", "checkpoint", "busy", step=8,
             launchers=(TORCH,), keras=(GLOO,)),
        Case("fewer-metric", "one batch fewer before an average of metrics", "settings",
             "steps", options=("metric",), launchers=(), keras=(GLOO, MPI)),
        Case("collective", "a collective of the script that other ranks do not run", "step",
             "collective", says="rank 1 has (ended|not joined collective .*'accordion)",
             launchers=(TORCH,)),
        Case("collective-horovod", "a collective of the script that other ranks do not run",
             "step", "collective", launchers=(GLOO, MPI)),
    ),
    "Pauses and clocks": (
        Case("pause", f"all processes stop for {PAUSE:g} s", "exchange", "pause", GOES_ON,
             launchers=(GLOO, MPI), keras=(GLOO, MPI), environment=PATIENT),
        Case("pause-torch", f"all processes stop for {PAUSE:g} s", "exchange", "pause",
             says="ConnectionLost", launchers=(TORCH,)),
        Case("pause-average", f"all processes stop for {PAUSE:g} s, LocalSGD", "average",
             "pause", GOES_ON, method="local", launchers=(GLOO,), environment=PATIENT),
        Case("pause-groups", f"all processes stop for {PAUSE:g} s, WAGMA", "average", "pause",
             GOES_ON, method="wagma", ranks=4, launchers=(MPI,)),
        Case("clock-ahead", "the clock jumps an hour ahead in an exchange", "exchange", "clock",
             GOES_ON, options=("others late",), keras=(GLOO, MPI)),
        Case("clock-back", "the clock jumps an hour back in an exchange", "exchange",
             "clock back", GOES_ON, options=("others late",), launchers=(MPI,), keras=(MPI,)),
    ),
    "What only watches": (
        Case("ledger-unwritable", "the ledger's folder cannot be written", "settings",
             "ledger unwritable", GOES_ON, rank=0, options=("ledger",), launchers=ONE,
             keras=(GLOO,)),
        Case("ledger-file", "a file in the place of the ledger's folder", "settings",
             "ledger file", GOES_ON, rank=0, options=("ledger",), launchers=(TORCH,)),
        Case("ledger-full", "full disk while the ledger is written", "ledger", "full", GOES_ON,
             rank=0, step=0, options=("ledger",), launchers=(TORCH,), keras=(GLOO,)),
        Case("ledger-io", "I/O error when the ledger is opened", "ledger", "io open", GOES_ON,
             rank=0, step=0, options=("ledger",), launchers=(TORCH,)),
        Case("receipt-full", "full disk while the receipt is written", "receipt", "full", GOES_ON,
             rank=0, step=0, options=("ledger",), launchers=(TORCH,)),
        Case("ledger-linked", "a link in the place of the ledger's file", "ledger", "linked",
             GOES_ON, rank=0, step=0, options=("ledger",), launchers=(TORCH,)),
        Case("ledger-removed", "the ledger's folder is removed", "ledger", "removed", GOES_ON,
             rank=0, step=0, options=("ledger",), launchers=(TORCH,)),
        Case("sink-full", "full disk in a sink", "settings", "sink full", GOES_ON, rank=0,
             options=("sink",), launchers=ONE),
        Case("sink", "exception in a sink", "sink", "raise", GOES_ON, rank=0,
             options=("sink",), launchers=(TORCH,), keras=(GLOO,)),
        Case("sink-close", "exception at the end of a sink", "sink's end", "raise", GOES_ON,
             rank=0, options=("sink",), launchers=(TORCH,)),
        Case("tracker", "exception in an experiment tracker", "tracker", "raise", GOES_ON,
             rank=0, options=("tracker",), launchers=(TORCH,)),
        Case("fork", "a forked child leaves: sys.exit(0)", "step", "fork", GOES_ON,
             options=("ledger",), rank=0, launchers=(MPI, TORCH)),
    ),
    "Names": (
        Case("named-kill", "SIGKILL, 4 ranks", "exchange", "kill", ranks=4,
             says="rank 1 has ended", launchers=(TORCH,)),
        Case("named-exit", "a rank leaves early: sys.exit(0)", "step", "exit", ranks=3,
             says="rank 1 has left", launchers=(TORCH,)),
        Case("named-error", "exception in forward", "forward", "raise", ranks=3,
             says="rank 1 has failed .ValueError: injected", launchers=(TORCH,)),
        Case("named-stop", "SIGSTOP in forward, 4 ranks", "forward", "stop", ranks=4,
             says="rank 1 does not answer", launchers=(TORCH,)),
        Case("worker", "a worker of a data loader is killed", "exchange", "worker", ranks=2,
             says="DataLoader worker", options=("others late",), launchers=(TORCH,)),
    ),
    "Gradients that are not finite, or huge": (
        Case("nan", "NaN on one rank", "gradient", "nan", SPREADS, launchers=(TORCH,)),
        Case("inf", "Inf on one rank", "gradient", "inf", SPREADS, launchers=(), keras=(GLOO,)),
        Case("nan-scaler", "NaN on one rank, GradScaler", "gradient", "nan", SKIPS,
             options=("scaler",), launchers=ONE),
        Case("inf-scaler", "Inf on one rank, GradScaler", "gradient", "inf", SKIPS,
             options=("scaler",), launchers=(TORCH,)),
        Case("spike", "1e20 on one rank", "gradient", "spike", SKIPS, launchers=ONE,
             keras=(GLOO,)),
        Case("nan-average", "NaN on one rank, LocalSGD, GradScaler", "gradient", "nan", GOES_ON,
             method="local", options=("scaler",), launchers=(GLOO,)),
    ),
    "Payloads": (
        Case("payload-nan", "NaN in a payload", "payload", "nan", SPREADS, launchers=(TORCH,)),
        Case("payload-truncated", "a payload is truncated", "payload", "truncate",
             launchers=ONE),
        Case("payload-longer", "a payload is too long", "payload", "lengthen",
             launchers=(TORCH,)),
        Case("payload-random", "a payload has random bytes", "payload", "random", REFUSED,
             PAYLOAD, launchers=ONE, keras=(GLOO,)),
        Case("payload-method", "a payload of another method", "payload", "dense", REFUSED,
             PAYLOAD, launchers=(TORCH,)),
    ),
    "Ranks that differ": (
        Case("model-shape", "another model: a wider layer", "settings", "width", REFUSED,
             "set up differently|Mismatched BROADCAST", launchers=ONE),
        Case("model-layers", "another model: one layer more", "settings", "layers", REFUSED,
             "set up differently", launchers=(TORCH,)),
        Case("compressor", "another compressor", "settings", "compressor", REFUSED,
             "set up differently.*TopK", launchers=ONE, keras=(GLOO,)),
        Case("averaging", "another averaging method", "settings", "averaging", REFUSED,
             "set up differently", method="local", launchers=(GLOO,)),
        Case("levels", "another level", "settings", "level", method="accordion", launchers=ONE),
        Case("version", "another version", "settings", "version", REFUSED,
             "set up differently.*accordion_hvd", launchers=(TORCH,)),
        Case("weights", "other initial weights", "settings", "weights", REFUSED,
             "ReplicasDiffer|replicas differ", launchers=(GLOO,)),
        Case("rate", "another learning rate", "settings", "rate", REFUSED, "replicas differ",
             launchers=(TORCH,)),
    ),
    "Uneven data": (
        Case("join", "uneven data: hvd.join", "settings", "steps", options=("join",),
             launchers=(GLOO,)),
        Case("join-torch", "uneven data: hvd.join", "settings", "steps", options=("join",),
             says="not available over torch.distributed|ConnectionLost", launchers=(TORCH,)),
    ),
    "Files": (
        Case("full-disk", "full disk while rank 1 saves", "checkpoint", "full", REFUSED,
             "No space left on device", step=8, resumed_on=2, launchers=(TORCH,), keras=(GLOO,)),
        Case("io-write", "I/O error while rank 1 writes", "checkpoint", "io", REFUSED,
             "rank-00001-of-00002.npz .* cannot be written: Input/output error", step=8,
             resumed_on=2, launchers=ONE),
        Case("io-fsync", "I/O error while rank 1 forces its file to the disk", "checkpoint",
             "io fsync", REFUSED, "cannot be written: Input/output error", step=8, resumed_on=2,
             launchers=(TORCH,)),
        Case("full-rename", "full disk while rank 1 renames its file", "checkpoint",
             "full rename", REFUSED, "cannot be written: No space left", step=8, resumed_on=2,
             launchers=(TORCH,)),
        Case("full-manifest", "full disk while the manifest is written", "manifest", "full",
             REFUSED, "manifest.json .* cannot be written: No space left", step=8, rank=0,
             resumed_on=2, launchers=(TORCH,), keras=(GLOO,)),
        Case("io-folder", "I/O error while a checkpoint's folder is made", "checkpoint folder",
             "io mkdir", REFUSED, "failed on rank 0: .* Input/output error", step=8, rank=0,
             resumed_on=2, launchers=(TORCH,)),
        Case("file-linked", "a link in the place of rank 1's file", "checkpoint", "linked",
             GOES_ON, step=8, launchers=(TORCH,)),
        Case("locked", "another job saves to the directory", "claim", "locked", REFUSED,
             "job 7 .process 12 on another host. saves to this directory, too", step=4, rank=0,
             launchers=ONE),
        Case("taken-over", "another job has saved to the directory, without locks", "claim",
             "taken over", REFUSED, "job 7 has saved to this directory, too", step=8, rank=0,
             resumed_on=2, launchers=(TORCH,)),
        Case("unwritable", "checkpoint folder cannot be written", "claim",
             "unwritable", REFUSED, "writing to .* failed", rank=0, step=4, launchers=(GLOO,)),
        Case("cache", "unwritable cache", "", "", GOES_ON,
             environment=(("XDG_CACHE_HOME", "/proc/cache"),), launchers=(TORCH,)),
        Case("cut", "a checkpoint is cut short", "files", "cut", RESTORED, resumed_on=2,
             launchers=(TORCH,), keras=(GLOO,)),
        Case("swapped", "files swapped between ranks", "files", "swapped", RESTORED,
             resumed_on=2, launchers=(TORCH,)),
        Case("missing", "the file of one rank is missing", "files", "missing", RESTORED,
             resumed_on=2, launchers=(GLOO,)),
        Case("fewer-ranks", "a checkpoint of another number of ranks", "files", "", RESTORED,
             resumed_on=3, launchers=(GLOO,)),
        Case("nested", "a manifest is nested too deeply", "files", "nested", RESTORED,
             resumed_on=2, launchers=(TORCH,)),
        Case("other-format", "a checkpoint of another format", "files", "format", REFUSED,
             "has format 7, but must have 1", resumed_on=2, launchers=(TORCH,)),
        Case("lacking", "a checkpoint lacks a key", "files", "lacking", REFUSED,
             "has no 'history'", resumed_on=2, launchers=(TORCH,)),
        Case("other-compressor", "a checkpoint of another compressor", "files", "compressor",
             REFUSED, "the compression is .* when saved", resumed_on=2, launchers=(TORCH,)),
        Case("other-shape", "a checkpoint of another model", "files", "shape", REFUSED,
             "was .* when saved", resumed_on=2, launchers=(TORCH,)),
        Case("claims-much", "a small file claims 12 GB", "files", "claims much", REFUSED,
             "is not whole", resumed_on=2, launchers=(TORCH,)),
        Case("no-checkpoint", "all checkpoints are damaged", "files", "all", REFUSED,
             "has .* bytes, but must have", resumed_on=2, launchers=(TORCH,)),
    ),
    "Errors and signals": (
        Case("memory", "out of memory in an encode", "encode", "memory", launchers=ONE),
        Case("hook", "exception in backward", "gradient", "raise", launchers=(TORCH,)),
        Case("forward-error", "exception in forward", "forward", "raise", launchers=(),
             keras=(GLOO,)),
        Case("interrupt", "Ctrl-C (SIGINT) to one rank", "step", "interrupt"),
        Case("interrupt-all", "Ctrl-C (SIGINT) to the launcher", "exchange", "launcher"),
    ),
}
# fmt: on

CASES = {case.name: case for cases in SECTIONS.values() for case in cases}
