"""Copies of a dump that may be sent to somebody: token ids, texts and names are hashed, numbers and structure stay.

A keyed hash (BLAKE2, RFC 7693) takes the place of each token id, of each text that is not a word of this package's
formats, and of each part of a parameter's or module's name that is not usual in transformers. The same key gives the
same hash, so two dumps that were copied with one key compare as the originals do. What the numbers tell stays: weights,
gradients, rewards, lengths.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from regress.dump.dump_location import Location, location
from regress.dump.dump_manifest import Provenance
from regress.dump.dump_reader import DumpReader
from regress.dump.numpy_arrays import Array
from regress.dump.record import LOSS_ROWS, Record
from regress.dump.recorder import Recorder
from regress.errors import DumpError

_NAMED = frozenset({"activations", "gradient", "gradient_clipped", "param", "optimizer"})
"""Record types whose tensors have the names of parameters or modules."""
_TOKENS = re.compile(r"(?!position_ids$).*(?:_ids|^ids|tokens|labels|targets|sequences)$")
"""Names of integer tensors that hold token ids."""
_WORDS = frozenset(
    {
        *(
            "aggregation",
            "denominator_scope",
            "device",
            "finish_reason",
            "layout",
            "metric_parts",
            "optimizer_type",
        ),
        *(
            "algorithm",
            "batching",
            "capture",
            "optimizer",
            "parallel",
            "padding_side",
            "dtype",
            "dump_format",
        ),
    }
)
"""Keys below which short words are those of this package or of torch."""
_MODULES = frozenset(
    {
        *(
            "model",
            "transformer",
            "language_model",
            "base_model",
            "layers",
            "h",
            "blocks",
            "weight",
            "bias",
            "default",
        ),
        *(
            "embed_tokens",
            "wte",
            "wpe",
            "embed",
            "norm",
            "ln_f",
            "ln_1",
            "ln_2",
            "lm_head",
            "score",
            "module",
        ),
        *(
            "self_attn",
            "attn",
            "attention",
            "linear_attn",
            "q_proj",
            "k_proj",
            "v_proj",
            "o_proj",
            "qkv_proj",
        ),
        *("c_attn", "c_proj", "c_fc", "q_norm", "k_norm", "mlp", "gate", "up_proj", "gate_proj", "down_proj"),
        *("gate_up_proj", "experts", "shared_expert", "input_layernorm", "post_attention_layernorm"),
        *("pre_feedforward_layernorm", "post_feedforward_layernorm", "lora_A", "lora_B"),
    }
)
"""Parts of names that models of transformers share, which tell nothing of whose model it is."""
_CHOSEN = frozenset({"rewards", "extra"})
"""Fields whose keys are names that a user chose: reward functions, and what no field of this package holds."""
_WORD = re.compile(r"[A-Za-z0-9_\- ]{1,40}|torch(?:\.\w+)+")
_LIBRARIES = frozenset({"versions", "environment", "mesh"})
_KEY = re.compile(r"[\w/.-]{1,64}")


class Redaction:
    """Replaces what could tell whose dump it is.

    Args:
        key: secret under which the same text has the same hash; by default one is drawn.
    """

    def __init__(self, key: str | None = None) -> None:
        self._key = os.urandom(32) if key is None else blake2b(key.encode()).digest()
        self._seen: dict[int, int] = {0: 0}
        self._names: set[str] = set()

    def text(self, text: str) -> str:
        """Return the hash of a text; an empty one stays."""
        return blake2b(text.encode(), key=self._key, digest_size=8).hexdigest() if text else text

    def token(self, token: int) -> int:
        """Return the 52-bit hash of a token id; 0 stays, which fills padding."""
        if token not in self._seen:
            digest = blake2b(str(token).encode(), key=self._key, digest_size=8).digest()
            self._seen[token] = 1 + (int.from_bytes(digest, "big") >> 12)
        return self._seen[token]

    def name(self, name: str) -> str:
        """Return a dotted name with each part hashed but for numbers and usual ones; what follows a slash stays."""
        path, slash, kind = name.partition("/")
        parts = [
            part if part.isdigit() or part in _MODULES else "n" + self.text(part) for part in path.split(".")
        ]
        return ".".join(parts) + slash + kind

    def record(self, record: Record) -> Record:
        """Return a record without ids, texts and names."""
        named = record.type in _NAMED
        if named:
            self._names |= {base for name in record.tensors for base in (name, name.partition("/")[0])}
        meta = self.tree(record.meta, named=named)
        tensors = {
            self.name(name) if named else name: array if named else self._array(name, array)
            for name, array in record.tensors.items()
        }
        return replace(record, tensors=tensors, meta=meta)

    def provenance(self, found: Provenance) -> Provenance:
        """Return where a dump comes from: versions and numbers, and words that choose how something is computed."""
        facts = {key: value if key in _LIBRARIES else self.tree(value) for key, value in vars(found).items()}
        return Provenance(**facts)

    def tree(self, tree: Any, *, named: bool = False, words: bool = False, own: bool = False) -> Any:
        """Return JSON with texts hashed, but for words of the package, and with names in keys hashed.

        Args:
            named: keys may be names of parameters or modules: those that were met, and all with a dot.
            words: short words stay.
            own: all keys are names that somebody chose.
        """
        if isinstance(tree, Mapping):
            return {
                self._member(key, named, own): self.tree(
                    value, named=named, words=words or key in _WORDS, own=key in _CHOSEN
                )
                for key, value in tree.items()
            }
        if isinstance(tree, list | tuple):
            return [self.tree(value, named=named, words=words) for value in tree]
        if not isinstance(tree, str) or tree == LOSS_ROWS or (words and _WORD.fullmatch(tree)):
            return tree
        return self.text(tree)

    def _member(self, key: str, named: bool, own: bool) -> str:
        if named and (key in self._names or "." in key):
            return self.name(key)
        return self.text(key) if own or not _KEY.fullmatch(key) else key

    def _array(self, name: str, array: Array) -> Array:
        if array.dtype.kind not in "iu" or not _TOKENS.fullmatch(name):
            return array
        known, places = np.unique(array, return_inverse=True)
        hashes = np.array([self.token(int(token)) for token in known], np.int64)
        return hashes[places].reshape(array.shape)


def copy_dump(
    source: str | Location,
    target: str | Location,
    change: Redaction | None = None,
    *,
    format: str | None = None,
    advance: Callable[[], None] = lambda: None,
) -> int:
    """Copy a dump, verifying what is read, and return the number of its records.

    Args:
        target: a folder or URL without a dump.
        change: how to redact; by default everything stays as it is.
        format: safetensors, pt or jsonl; by default as it is.
        advance: is called after each record.

    Raises:
        DumpError: if the source is incomplete or damaged, or the target cannot be written; it then has no manifest.
    """
    dump = DumpReader(source)
    if str(location(target)) == str(dump.folder):
        raise DumpError(f"{target} is the dump itself: give another folder")
    provenance = dump.manifest.provenance
    recorder = Recorder(
        target,
        options={type: True for type, _ in dump.entries.values()},
        format=format or dump.manifest.format,
        provenance=provenance if change is None else change.provenance(provenance),
    )
    complete = False
    try:
        for name in dump.names():
            record = dump.read(name)
            recorder.put(record if change is None else change.record(record), Path(name).parent.name)
            advance()
        complete = True
    finally:
        recorder.close(complete)
    return len(dump.names())
