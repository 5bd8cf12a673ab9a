"""Train a small language model on text that one child process reads and tokenises, epoch by epoch.

Tokenising is Python code: on threads beside the training step it would hold the GIL that the step
needs to launch its kernels. So the whole pipeline lives in one child process:

    embed_shuffle(DistributedRandomSampler(...))   which passages this rank gets; anew every epoch
        -> read        the passage's bytes, from its file
        -> tokenise    words to numbers, two at a time
        -> aggregate   as many as a batch has
        -> collate     two tensors, as long as the longest passage

``add_source(..., continuous=True)`` keeps the pipeline going from one epoch to the next: while the
last steps of an epoch are made, the first batches of the next are on their way. Each pass over the
loader is one epoch. Ranks get equally many passages, so that all make equally many steps.

    python examples/train_language_model.py --data DIR [--epochs N] [--batch-size N] [...]
    torchrun --nproc-per-node 8 examples/train_language_model.py --data DIR [...]
    python examples/train_language_model.py --smoke [--data DIR]

DIR has ``*.txt`` files, at any depth; a passage ends at an empty line. Without it, the program
makes some up.

Prints: what there is to train on; after every epoch the passages, the loss over them (mean of a
token, in nats), tokens a second, and the share of the time that training waited for data.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence

from spdl_torch.spdl.pipeline import PipelineBuilder, run_pipeline_in_subprocess
from spdl_torch.spdl.source import DistributedRandomSampler
from spdl_torch.spdl.source.utils import embed_shuffle

END, PADDING, FIRST_WORD = 256, -100, 257  # tokens below 256 are bytes
WORD = re.compile(r"\s?\w+|\s?[^\w\s]|\s")


class Corpus:
    """The passages of text files. Holds where they are, and reads one on request."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self._places: list[tuple[str, int, int]] = []
        for path in paths:
            content = path.read_bytes()
            for found in re.finditer(rb"\S(?:.|\n(?!\s*\n))*", content):
                self._places.append((str(path), *found.span()))

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> str:
        path, start, stop = self._places[index]
        with open(path, "rb") as file:
            file.seek(start)
            return file.read(stop - start).decode("utf-8", "replace")


class Tokenizer:
    """The most frequent words have a number each; others are spelled in bytes."""

    def __init__(self, texts: Iterable[str], num_words: int) -> None:
        counts = Counter(word for text in texts for word in WORD.findall(text))
        words = enumerate(counts.most_common(num_words), FIRST_WORD)
        self._numbers = {word: number for number, (word, _) in words}

    def __len__(self) -> int:
        return FIRST_WORD + len(self._numbers)

    def encode(self, text: str) -> list[int]:
        """Return the numbers of the words."""
        tokens: list[int] = []
        for word in WORD.findall(text):
            number = self._numbers.get(word)
            tokens += word.encode() if number is None else (number,)
        return tokens


def collate(passages: Sequence[Sequence[int]], context: int) -> tuple[Tensor, Tensor]:
    """Return inputs, and the token that follows each of them: int64, both (N, the longest passage's
    length)."""
    whole = [[END, *tokens, END][: context + 1] for tokens in passages]
    inputs = [torch.tensor(tokens[:-1]) for tokens in whole]
    targets = [torch.tensor(tokens[1:]) for tokens in whole]
    return pad_sequence(inputs, True, END), pad_sequence(targets, True, PADDING)


def make_loader(
    options: argparse.Namespace, corpus: Corpus, tokenizer: Tokenizer, rank: int, world_size: int
) -> Iterable[tuple[Tensor, Tensor]]:
    """Return the loader; each pass over it is an epoch. The child process starts here, and serves
    them all."""
    sampler = DistributedRandomSampler(
        len(corpus), rank=rank, world_size=world_size, seed=options.seed
    )
    config = (
        PipelineBuilder()
        .add_source(embed_shuffle(sampler), continuous=True)
        .pipe(corpus, name="read")
        .pipe(tokenizer.encode, name="tokenise", concurrency=2, output_order="input")
        .aggregate(options.batch_size, drop_last=True)
        .pipe(partial(collate, context=options.context), name="collate")
        .add_sink(buffer_size=4)
        .get_config()
    )
    return run_pipeline_in_subprocess(config, num_threads=options.num_threads)


class LanguageModel(nn.Module):
    """A transformer that predicts the next token: (N, T) -> (N, T, tokens)."""

    def __init__(self, num_tokens: int, context: int, width: int, num_layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(num_tokens, width)
        self.places = nn.Embedding(context, width)
        layer = nn.TransformerEncoderLayer(
            width, max(1, width // 32), 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, num_layers, nn.LayerNorm(width), False)
        for embedding in (self.tokens, self.places):
            nn.init.normal_(embedding.weight, std=0.05)  # the first doubles as the last layer

    def forward(self, tokens: Tensor) -> Tensor:
        """Return scores for what may follow each token."""
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        places = self.places.weight[:length]
        hidden = self.layers(self.tokens(tokens) + places, mask=mask, is_causal=True)
        return hidden @ self.tokens.weight.T


def train(options: argparse.Namespace, rank: int, world_size: int) -> None:
    """Train for all epochs."""
    corpus = Corpus(sorted(options.data.rglob("*.txt")))
    tokenizer = Tokenizer(map(corpus.__getitem__, range(len(corpus))), options.num_words)
    if len(corpus) < options.batch_size * world_size:
        raise SystemExit(
            f"--batch-size: {options.batch_size} passages for each of {world_size} rank(s) are "
            f"more than the {len(corpus)} in the *.txt files of --data."
        )
    say = partial(print, flush=True) if rank == 0 else lambda line: None
    say(f"{len(corpus):,} passages, a vocabulary of {len(tokenizer):,} tokens")
    torch.manual_seed(options.seed)
    model = LanguageModel(len(tokenizer), options.context, options.width, options.num_layers)
    model.to(options.device)
    trained = DistributedDataParallel(model) if world_size > 1 else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    loader = make_loader(options, corpus, tokenizer, rank, world_size)
    for epoch in range(1, options.epochs + 1):
        sums = torch.zeros(3, dtype=torch.float64, device=options.device)
        begin = asked = time.perf_counter()
        waited = 0.0
        for inputs, targets in loader:
            waited += time.perf_counter() - asked
            inputs, targets = inputs.to(options.device), targets.to(options.device)
            loss = cross_entropy(trained(inputs).flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            count = (targets != PADDING).sum()
            sums[0] += len(inputs)
            sums[1] += count
            sums[2] += loss.detach() * count
            asked = time.perf_counter()
        seconds = time.perf_counter() - begin
        if world_size > 1:
            dist.all_reduce(sums)
        passages, tokens, losses = sums.tolist()
        say(
            f"epoch {epoch}  {passages:.0f} passages  loss {losses / tokens:.4f}  "
            f"{tokens / seconds:,.0f} tokens/s  {seconds:.1f} s, waited for data "
            f"{waited / seconds:.0%}"
        )


def write_texts(folder: Path, num_files: int = 4, num_passages: int = 60) -> None:
    """Write invented texts: who does what to whom, in sentences that have a grammar."""
    generator = random.Random(0)
    people, things = ("Ada", "Ben", "the cat", "an owl"), ("bread", "a letter", "the moon", "rain")
    verbs = ("likes", "sees", "finds", "draws", "never forgets")
    for number in range(num_files):
        passages = []
        for _ in range(num_passages):
            sentences = (
                f"{generator.choice(people)} {generator.choice(verbs)} {generator.choice(things)}."
                for _ in range(generator.randint(1, 5))
            )
            passages.append(" ".join(sentences))
        (folder / f"{number}.txt").write_text("\n\n".join(passages), encoding="utf-8")


def main() -> None:
    """Parse the command line, join the other ranks, and train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, metavar="DIR", help="folder, see above; default: some is made up")
    add("--epochs", type=int, default=3, metavar="N")
    add("--batch-size", type=int, default=16, metavar="N", help="of each rank")
    add("--lr", type=float, default=3e-3)
    add("--context", type=int, default=128, metavar="TOKENS", help="longer passages are cut")
    add("--num-words", type=int, default=8000, metavar="N", help="words with a token of their own")
    add("--width", type=int, default=128, metavar="N", help="of the model")
    add("--num-layers", type=int, default=2, metavar="N", help="of the model")
    add("--num-threads", type=int, default=4, metavar="N", help="of the pipeline")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--seed", type=int, default=0)
    add("--smoke", action="store_true", help="little data and a small model, for a few seconds")
    options = parser.parse_args()
    if options.smoke:
        options.width, options.num_layers, options.context = 32, 1, 48
    if "LOCAL_RANK" in os.environ:  # torchrun started this process
        if options.device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    with tempfile.TemporaryDirectory() as made:
        if options.data is None:
            options.data = Path(made)
            write_texts(options.data)
        train(options, rank, world_size)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
