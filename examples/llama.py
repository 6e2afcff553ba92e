"""Text from a language model on cupykern: Llama 3, Mistral, Qwen 2.5 and 3, Gemma 1 to 3.

    python examples/llama.py path/to/a/model --prompt "Once upon a time" --tokens 64
    python examples/llama.py path/to/a/model --prompt "One" --prompt "Two, and" --weights int8
    mpiexec -n 2 python examples/llama.py path/to/a/model --prompt "Once" --parallel tensor

The folder is Hugging Face's: config.json, *.safetensors (16 bits, or FP8 with scales for blocks of
128 x 128) and tokenizer.json.  It needs the packages safetensors and tokenizers:

    pip install -e '.[examples]'

Prompts that find a slot are read together, in one call.  Then all sequences decode together, one
token each per step, which is one CUDA graph.  Keys and values are in pages; where a sequence ends,
the next prompt takes its slot and its pages.  The text of a single prompt is printed as it comes.
The layers are those of cupykern/tools/model.  Without a GPU everything runs on numpy arrays, where
times are those of an emulation.

With --parallel tensor each rank of an MPI job has a part of the weights and of the caches
(pip install -e '.[parallel]').  On GPUs, one a rank, data go through NCCL: not run yet.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import cupykern
from cupykern import parallel, targets
from cupykern.numerics import to_numpy
from cupykern.tools.model import cache as caches
from cupykern.tools.model.decoder import Decoder
from cupykern.tools.model.graph import Graph
from cupykern.tools.model.hugging_face import config_of, decoder_of
from cupykern.tools.model.linear import FORMATS
from cupykern.tools.model.tensor_parallel import decoder_of_rank

# --- files -------------------------------------------------------------------------------------

_DTYPES = {
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F32": np.float32,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
}


def read_json(path: Path) -> dict[str, Any]:
    """Raises OSError and ValueError."""
    found = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(found, dict):
        raise ValueError(f"{path} must hold a JSON object; got {type(found).__name__}")
    return found


def read_tokenizer(folder: Path) -> Any:
    """The Tokenizer of a folder's tokenizer.json.  Raises OSError and ValueError."""
    import tokenizers

    text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    try:
        return tokenizers.Tokenizer.from_str(text)
    except Exception as error:  # the package has no type of its own
        raise ValueError(f"{folder / 'tokenizer.json'} is not a tokenizer: {error}") from None


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a folder's *.safetensors.  Raises ValueError for other dtypes than _DTYPES."""
    import safetensors

    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            stored = safetensors.deserialize(path.read_bytes())
        except safetensors.SafetensorError as error:
            raise ValueError(f"{path} is no safetensors file: {error}") from None
        for name, one in stored:
            if one["dtype"] not in _DTYPES:
                raise ValueError(f"{name} is {one['dtype']}, not one of {', '.join(_DTYPES)}")
            array = np.frombuffer(one["data"], _DTYPES[one["dtype"]])
            tensors[name] = array.reshape(one["shape"])
    return tensors


def load(
    folder: Path,
    dtype: str = "bfloat16",
    weights: str | None = None,
    target: str | None = None,
    comm: parallel.Communicator | None = None,
) -> Decoder:
    """The model of a folder, or what the rank of `comm` has of it.  Raises OSError and ValueError.

    dtype, weights, target: as for `decoder_of`.
    """
    found = read_json(folder / "config.json")
    config, tensors = config_of(found), read_tensors(folder)
    options = dtype, weights, target
    if comm is None:
        return decoder_of(config, found["model_type"], tensors, *options)
    return decoder_of_rank(comm, config, found["model_type"], tensors, *options)


def end_tokens(folder: Path) -> set[int]:
    """The tokens that end a text."""
    ends: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        if (folder / name).exists():
            found = read_json(folder / name).get("eos_token_id")
            if found is not None:
                ends |= set(found) if isinstance(found, list) else {found}
    return ends


# --- generation --------------------------------------------------------------------------------

Chooser = Callable[[Any, Any, float, np.random.Generator], Any]


@dataclass
class Request:
    """A text under way.  pages: that hold its keys and values; new: tokens that were generated."""

    number: int
    prompt: list[int]
    pages: list[int] = field(default_factory=list)
    new: list[int] = field(default_factory=list)


def choose(xp: Any, logits: Any, temperature: float, rng: np.random.Generator) -> Any:
    """The next tokens, (batch,): the likeliest ones for temperature 0, else drawn."""
    if temperature == 0:
        return logits.argmax(axis=-1)
    sums = cupykern.softmax(logits, scale=1 / temperature).cumsum(axis=-1)
    # In (0, 1], so that what is drawn has a probability.
    draws = xp.asarray(1 - rng.random((len(logits), 1), np.float32))
    return (sums < draws * sums[:, -1:]).sum(axis=-1)


class Engine:
    """Continuous batching: up to `slots` sequences decode together, others wait.

    pages: of `page` tokens each, that all sequences share.  room: the most tokens of a sequence.
    cache: the format of keys and values, a name of `caches.FORMATS`.
    choose: gives the next tokens, as the function `choose`.
    """

    def __init__(
        self,
        decoder: Decoder,
        target: str | None = None,
        *,
        slots: int = 8,
        room: int = 2048,
        page: int = 64,
        pages: int | None = None,
        cache: str = "16bit",
        choose: Chooser = choose,
    ):
        self._decoder, self._target = decoder, targets.get(target)
        self._choose = choose
        xp, per_sequence = self._target.xp, -(-room // page)
        self._page, self._free = page, list(range(pages or slots * per_sequence))[::-1]
        dtype = caches.dtype_of(cache, decoder.embedding.dtype)
        self._cache = caches.paged(
            decoder.config, slots, len(self._free), dtype, target, page=page, room=room
        )
        self._running: list[Request | None] = [None] * slots
        self._tokens = xp.zeros(slots, np.int64)  # the newest of each sequence
        self._step: Graph | None = None
        self._changed = False  # the sequences that run, since the last step

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        count: int,
        ends: Set[int] = frozenset(),
        temperature: float = 0.0,
        seed: int = 0,
    ) -> Iterator[tuple[int, int]]:
        """Yield (the prompt's number, the next token) as they come, up to `count` for each prompt.

        A token of `ends` ends a sequence; it is not yielded.  temperature 0: the likeliest token.
        Raises ValueError for prompts that are empty or too long.
        """
        for prompt in prompts:
            longest = min(self._cache.room, len(self._free) * self._page)
            if not 0 < len(prompt) <= longest - count:
                raise ValueError(
                    f"a prompt must have 1 to {longest - count} tokens; got {len(prompt)}"
                )
        waiting = deque(Request(i, list(prompt)) for i, prompt in enumerate(prompts))
        rng = np.random.default_rng(seed)
        while waiting or any(self._running):
            slots = []
            while waiting and (slot := self._admit(waiting[0], count)) is not None:
                slots.append(slot)
                waiting.popleft()
            if slots:
                logits = self._prefill(slots)
                self._tokens[slots] = self._choose(self._target.xp, logits, temperature, rng)
                yield from self._take(slots, count, ends)
            if any(self._running):
                logits = self._decode()
                self._tokens[...] = self._choose(self._target.xp, logits, temperature, rng)
                yield from self._take(range(len(self._running)), count, ends)

    def _admit(self, one: Request, count: int) -> int | None:
        """A slot and pages for all that the sequence may need; None: there are not enough yet."""
        need = -(-(len(one.prompt) + count) // self._page)
        if None not in self._running or need > len(self._free):
            return None
        slot = self._running.index(None)
        one.pages = [self._free.pop() for _ in range(need)]
        row = np.full(self._cache.block_table.shape[1], -1, np.int32)
        row[:need] = one.pages
        self._cache.block_table[slot] = self._target.xp.asarray(row)
        self._running[slot], self._changed = one, True
        return slot

    def _prefill(self, slots: Sequence[int]) -> Any:
        """Logits after the prompts of these slots, which are read together."""
        prompts = [
            one.prompt if one and slot in slots else [] for slot, one in enumerate(self._running)
        ]
        tokens = self._target.xp.asarray(np.array([token for own in prompts for token in own]))
        counts = [len(own) for own in prompts]
        logits = self._decoder.append(tokens, counts, [0] * len(counts), self._cache)
        return logits[self._target.xp.asarray(np.array(slots))]

    def _decode(self) -> Any:
        """Logits of all slots."""
        if self._changed:
            self._set_lengths()
        if self._step is None:
            decoder, tokens, cache = self._decoder, self._tokens, self._cache
            self._step = Graph(lambda: decoder.decode(tokens, cache), self._target)
            self._set_lengths()  # before a capture it ran
        return self._step()

    def _set_lengths(self) -> None:
        """The newest token of each sequence is not in the cache yet."""
        lengths = [len(x.prompt) + len(x.new) - 1 if x else 0 for x in self._running]
        self._cache.set_lengths(np.array(lengths, np.int32))
        self._changed = False

    def _take(self, slots: Sequence[int], count: int, ends: Set[int]) -> Iterator[tuple[int, int]]:
        """Yield these slots' newest tokens; sequences that end leave their slots and pages."""
        newest = to_numpy(self._tokens).tolist()
        for slot in slots:
            one = self._running[slot]
            if one is None:
                continue
            if newest[slot] not in ends:
                one.new.append(newest[slot])
                yield one.number, newest[slot]
            if newest[slot] in ends or len(one.new) == count:
                self._free += one.pages
                self._running[slot], self._changed = None, True


def chooser_of(comm: parallel.Communicator) -> Chooser:
    """`choose` from logits whose columns are split over ranks; the same on all of them."""

    def choose(xp: Any, logits: Any, temperature: float, rng: np.random.Generator) -> Any:
        if temperature == 0:
            return parallel.vocabulary_parallel_argmax(comm, logits)
        draws = xp.asarray(1 - rng.random(len(logits)))
        return parallel.vocabulary_parallel_sample(comm, logits, draws, temperature=temperature)

    return choose


def communicator(target: str | None) -> parallel.Communicator:
    """Of all processes of an MPI job: NCCL's with a GPU for each, of numpy arrays MPI's own."""
    from mpi4py import MPI

    world = parallel.MpiCommunicator(MPI.COMM_WORLD, timeout=300)  # weights may load slowly
    if targets.get(target).xp is np:
        return world
    import cupy
    from cupy.cuda import nccl

    local = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
    cupy.cuda.Device(local.Get_rank() % cupy.cuda.runtime.getDeviceCount()).use()
    unique = MPI.COMM_WORLD.bcast(nccl.get_unique_id() if world.rank == 0 else None)
    raw = nccl.NcclCommunicator(world.size, unique, world.rank)
    return parallel.NcclCommunicator(raw, control=world)


class Texts:
    """Tokens to text, as they come: a character of several tokens waits for the last of them."""

    def __init__(self, tokenizer: Any, count: int):
        self._tokenizer = tokenizer
        self._tokens: list[list[int]] = [[] for _ in range(count)]
        self.texts = [""] * count

    def add(self, number: int, token: int) -> str:
        """What the token adds to the text."""
        self._tokens[number].append(token)
        text = self._tokenizer.decode(self._tokens[number])
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        new, self.texts[number] = text[len(self.texts[number]) :], text
        return new


# --- the command -------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="config.json, *.safetensors, tokenizer.json")
    parser.add_argument("--prompt", action="append", required=True, help="once or several times")
    parser.add_argument("--tokens", type=int, default=64, help="the most to generate for each")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: the likeliest token")
    parser.add_argument("--seed", type=int, default=0, help="of draws")
    parser.add_argument("--slots", type=int, default=8, help="sequences that decode together")
    parser.add_argument("--room", type=int, default=2048, help="the most tokens of a sequence")
    parser.add_argument("--weights", choices=FORMATS, help="default: as they are stored")
    parser.add_argument("--cache", choices=caches.FORMATS, default="16bit", help="keys, values")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--target", choices=("cuda", "hip", "host"), help="default: the GPU")
    parser.add_argument("--parallel", choices=("tensor",), help="split over the ranks of mpiexec")
    args = parser.parse_args(arguments)
    try:
        if min(args.tokens, args.slots, args.room) < 1 or args.temperature < 0:
            raise ValueError("--tokens, --slots and --room must be positive, --temperature >= 0")
        comm = communicator(args.target) if args.parallel else None
        decoder = load(args.folder, args.dtype, args.weights, args.target, comm)
        tokenizer = read_tokenizer(args.folder)
        prompts = [tokenizer.encode(text).ids for text in args.prompt]
        how: dict[str, Any] = {} if comm is None else {"choose": chooser_of(comm)}
        how |= {"slots": args.slots, "room": args.room, "cache": args.cache}
        engine = Engine(decoder, args.target, **how)
        first = comm is None or comm.rank == 0  # that prints
        texts, times = Texts(tokenizer, len(prompts)), [time.perf_counter()]
        options = args.tokens, end_tokens(args.folder), args.temperature, args.seed
        for number, token in engine.generate(prompts, *options):
            new = texts.add(number, token)
            times.append(time.perf_counter())
            if len(prompts) == 1 and first:
                print(new, end="", flush=True)
    except ImportError as error:
        print(
            f"error: {error.name} is missing: pip install -e '.[examples,parallel]'",
            file=sys.stderr,
        )
        return 1
    except (OSError, ValueError, parallel.CommunicationError, targets.UnavailableError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if not first:
        return 0
    print("" if len(prompts) == 1 else "\n".join(map(str.__add__, args.prompt, texts.texts)))
    where = " (host emulation)" if targets.get(args.target).xp is np else ""
    rate = (len(times) - 1) / (times[-1] - times[0])
    print(
        f"{len(times) - 1} tokens, {rate:.1f} a second, compiling included{where}", file=sys.stderr
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
