"""Real data in the formats that public data sets use: CIFAR's binary files, GLUE's TSV, plain text.

Data is never part of the repository. It lies in a folder of its own, a subfolder a set; `SETS` names them and
what belongs in each: `--data DIR`, else $NF_DATA, else ~/.cache/nf_jax_data. Data of your own in the format
of a set works as well, in a folder of that name.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

SIDE = 32  # pixels
PIXELS = 3 * SIDE * SIDE

# ============================================================================================ folders


class DataSet(NamedTuple):
    """Attributes: source: what to get, and from where; files: what its folder must hold (`*`: anything)."""

    source: str
    files: tuple[str, ...]


CIFAR10_FILES = tuple(
    f"cifar-10-batches-bin/{name}.bin" for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
)
CIFAR100_FILES = ("cifar-100-binary/train.bin", "cifar-100-binary/test.bin")
PRETRAINED_FILES = ("config.json", "model*.safetensors", "tokenizer.json")  # weights in one file or several
CIFAR = "https://www.cs.toronto.edu/~kriz/cifar.html"
HUB = "https://huggingface.co"


def pretrained(repository: str) -> DataSet:
    """A folder of the Hugging Face hub: weights, their config, a tokenizer."""
    return DataSet(f"{HUB}/{repository}", PRETRAINED_FILES)


SETS: dict[str, DataSet] = {
    "cifar10": DataSet(f"the binary version of CIFAR-10, {CIFAR}", CIFAR10_FILES),
    "cifar100": DataSet(f"the binary version of CIFAR-100, {CIFAR}", CIFAR100_FILES),
    "icons100": DataSet("32x32 icons of 100 classes in CIFAR-100's binary format", CIFAR100_FILES),
    "sst2": DataSet(
        "sentences with labels 0 and 1, as SST-2 of https://gluebenchmark.com", ("train.tsv", "dev.tsv")
    ),
    "text": DataSet(
        "prose as plain UTF-8, as WikiText or a book collection", ("train.txt", "valid.txt", "test.txt")
    ),
    "minilm": pretrained("sentence-transformers/all-MiniLM-L6-v2"),
    "bert": pretrained("google-bert/bert-base-uncased"),
    "distilbert": pretrained("distilbert/distilbert-base-uncased"),
    **{
        f"pythia-{size}": pretrained(f"EleutherAI/pythia-{size}")
        for size in ("14m", "70m", "160m", "410m", "1b", "1.4b", "6.9b")
    },
}


def find_data(name: str, data: Path | None = None) -> Path:
    """The folder of one set.

    Args:
      name: of `SETS`.
      data: the folder of all sets; None: $NF_DATA, else ~/.cache/nf_jax_data.

    Raises:
      ValueError: it is not there, or not complete; one line that says what to get and where to put it.
    """
    if name not in SETS:
        raise ValueError(f"data: expected one of {', '.join(SETS)}, got {name!r}")
    root = data or Path(os.environ.get("NF_DATA") or "~/.cache/nf_jax_data")
    folder, wanted = root.expanduser() / name, SETS[name]
    missing = [file for file in wanted.files if not any(folder.glob(file))]
    if missing:
        raise ValueError(
            f"{name}: no {missing[0]} in {folder}; get {wanted.source} and put "
            f"{', '.join(wanted.files)} there, or say where they are with --data DIR (the folder that "
            f"holds {name}/)"
        )
    return folder


# ============================================================================================= images


class Images(NamedTuple):
    """Attributes: images: uint8[n, 32, 32, 3]; labels: int32[n]."""

    images: np.ndarray
    labels: np.ndarray


def read_cifar(folder: Path, num_classes: int) -> tuple[Images, Images]:
    """The binary files of CIFAR-10 or CIFAR-100, or others laid out alike.

    A record is one byte of label (CIFAR-100: a coarse one, not read, then the fine one) and 3072 of pixels:
    red, green, blue, each 32 rows of 32. Any number of records a file.

    Args:
      folder: holds `cifar-10-batches-bin` or `cifar-100-binary`.
      num_classes: 10 or 100, which is also the format.

    Returns:
      (train, test).

    Raises:
      ValueError: a file is missing or is not of this format; which, and why.
    """
    files = {10: CIFAR10_FILES, 100: CIFAR100_FILES}.get(num_classes)
    if files is None:
        raise ValueError(f"num_classes: expected 10 or 100, got {num_classes}")
    parts = [read_records(folder / file, num_classes) for file in files]
    train = Images(*(np.concatenate(arrays) for arrays in zip(*parts[:-1], strict=True)))
    return train, parts[-1]


def read_records(path: Path, num_classes: int) -> Images:
    """One binary file of CIFAR-10 or CIFAR-100."""
    num_labels = 1 if num_classes == 10 else 2
    size = num_labels + PIXELS
    values = np.frombuffer(read_bytes(path), np.uint8)
    if len(values) % size:
        raise ValueError(
            f"{path}: expected records of {size} bytes (CIFAR-{num_classes}, binary version), "
            f"got {len(values)} bytes, which are {len(values) / size:.2f} records"
        )
    records = values.reshape(-1, size)
    labels = records[:, num_labels - 1]
    if (wrong := np.flatnonzero(labels >= num_classes)).size:
        raise ValueError(
            f"{path}: expected labels from 0 to {num_classes - 1}, got {labels[wrong[0]]} "
            f"in record {wrong[0]}"
        )
    pixels = records[:, num_labels:].reshape(-1, 3, SIDE, SIDE)
    return Images(np.ascontiguousarray(pixels.transpose(0, 2, 3, 1)), labels.astype(np.int32))


# =============================================================================================== text


class Sentences(NamedTuple):
    """Attributes: sentences: n strings; labels: int32[n]."""

    sentences: list[str]
    labels: np.ndarray


def read_tsv(path: Path, text: str = "sentence", label: str = "label") -> Sentences:
    """Labelled sentences as GLUE lays them out: a line of column names, tabs between columns, no quoting.

    Args:
      path: the file, UTF-8.
      text: the column of the sentences.
      label: the column of the labels, whole numbers from 0 on.

    Raises:
      ValueError: a column is missing, or a line is not as the first says; which line, and why.
    """
    # Not splitlines(), which also breaks at characters that a sentence may hold.
    lines = read_text(path).replace("\r\n", "\n").removesuffix("\n").split("\n")
    names = lines[0].split("\t")
    if missing := [name for name in (text, label) if name not in names]:
        raise ValueError(f"{path}: expected a column {missing[0]!r} in line 1, got {names}")
    sentences, labels = [], []
    for number, line in enumerate(lines[1:], start=2):
        fields = line.split("\t")
        if len(fields) != len(names):
            raise ValueError(f"{path}, line {number}: expected {len(names)} columns, got {len(fields)}")
        row = dict(zip(names, fields, strict=True))
        if not (row[label].isascii() and row[label].isdecimal()):
            raise ValueError(f"{path}, line {number}: expected a label from 0 on, got {row[label]!r}")
        sentences.append(row[text])
        labels.append(int(row[label]))
    if not sentences:
        raise ValueError(f"{path}: expected lines after the first, got none")
    return Sentences(sentences, np.array(labels, np.int32))


def read_text(path: Path) -> str:
    """A plain text file.

    Raises:
      ValueError: it is missing, empty or not UTF-8.
    """
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: expected UTF-8, got another encoding: {error}") from None


def read_bytes(path: Path) -> bytes:
    if not path.is_file():
        raise ValueError(f"{path}: expected a file, found none")
    if not (content := path.read_bytes()):
        raise ValueError(f"{path}: expected data, the file is empty")
    return content
