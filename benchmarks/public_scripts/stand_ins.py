"""Write the small data sets, tokenizers, and models that public scripts read instead of downloads.

The Python of the scripts runs this file in the working folder of a script: `stand_ins.py NAME TEXT`.
"""

# mypy: ignore-errors
# The packages of the scripts are not installed in Meshboard's environment.

import json
import pickle
import random
import shutil
import subprocess
import sys
from pathlib import Path

MAX_TEXT_CHARS = 300_000
VOCABULARY_SIZE = 512
GLUE_METRIC = """
import datasets
import evaluate


class Glue(evaluate.Metric):
    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")})
        return evaluate.MetricInfo(description="", citation="", features=features)

    def _compute(self, predictions, references):
        accuracy = sum(a == b for a, b in zip(predictions, references)) / len(references)
        return {"accuracy": accuracy, "f1": accuracy}
"""


def read_text(path: Path) -> str:
    return path.read_text()[:MAX_TEXT_CHARS]


def write_tokenizer(text: str, folder: str):
    """Train a byte-pair tokenizer on a text, and save it as transformers does."""
    from tokenizers import ByteLevelBPETokenizer, Tokenizer
    from transformers import PreTrainedTokenizerFast

    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    trained = ByteLevelBPETokenizer()
    trained.train_from_iterator(text.splitlines(), vocab_size=VOCABULARY_SIZE, special_tokens=special)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(trained.to_str()),
        bos_token="<s>",
        pad_token="<pad>",
        eos_token="</s>",
        unk_token="<unk>",
        mask_token="<mask>",
        cls_token="<s>",
        sep_token="</s>",
        model_max_length=512,
    )
    tokenizer.save_pretrained(folder)
    return tokenizer


def write_data_set(folder: str, name: str, splits: dict) -> None:
    """Write rows of several splits as a local data set of the Hub's layout."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    lines = ["---", "configs:", f"- config_name: {name}", "  data_files:"]
    for split, rows in splits.items():
        (target / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        lines += [f"  - split: {split}", f"    path: {split}.jsonl"]
    (target / "README.md").write_text("\n".join([*lines, "---", ""]))


def prepare_characters(path: Path) -> None:
    """Write the characters of a text as nanoGPT's data."""
    target = Path("data/shakespeare_char")
    shutil.copy(path, target / "input.txt")
    subprocess.run([sys.executable, "prepare.py"], cwd=target, check=True)


def prepare_llama(path: Path) -> None:
    """Write a small Llama, its tokenizer, and a text for picotron."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    text = read_text(path)
    write_tokenizer(text, "tiny-llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    )
    for folder in ("tiny-llama", "hf_model/tiny-llama", "hf_model_safetensors"):
        LlamaForCausalLM(config).save_pretrained(folder, safe_serialization=True)
    write_data_set("tiny-text", "default", {"train": [{"text": line} for line in text.splitlines() if line]})


def prepare_glue(path: Path) -> None:
    """Write a small BERT, pairs of sentences, and a metric for examples of accelerate."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    text = read_text(path)
    tokenizer = write_tokenizer(text, "bert-base-cased")
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer), hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128
    )
    BertForSequenceClassification(config).save_pretrained("bert-base-cased")
    lines = [line for line in text.splitlines() if len(line) > 20]
    chosen = random.Random(0)
    splits = {}
    for split, num_rows in (("train", 640), ("validation", 64), ("test", 64)):
        rows = []
        for index in range(num_rows):
            first, label = chosen.choice(lines), index % 2
            rows.append({"sentence1": first, "sentence2": first if label else chosen.choice(lines), "label": label})
        splits[split] = [{**row, "idx": index} for index, row in enumerate(rows)]
    for folder in ("nyu-mll/glue", "glue"):
        write_data_set(folder, "mrpc", splits)
    Path("glue/glue.py").write_text(GLUE_METRIC)


def prepare_instructions(path: Path) -> None:
    """Write a small OPT and instructions for Alpaca."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    text = read_text(path)
    tokenizer = write_tokenizer(text, "tiny-gpt2")
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=len(tokenizer), n_positions=512, n_embd=64, n_layer=2, n_head=2)
    GPT2LMHeadModel(config).save_pretrained("tiny-gpt2")
    lines = [line for line in text.splitlines() if len(line) > 20][:320]
    rows = [{"instruction": "Repeat.", "input": line, "output": line} for line in lines]
    Path("instructions.json").write_text(json.dumps(rows))


def prepare_wikitext(path: Path) -> None:
    """Write a text as WikiText-2 for HelloDeepSpeed."""
    text = read_text(path)
    write_tokenizer(text, "roberta-base")
    write_data_set("wikitext", "wikitext-2-v1", {"train": [{"text": line} for line in text.splitlines()]})


def prepare_words(path: Path) -> None:
    """Write a text as WikiText-2 for Lightning."""
    text = read_text(path)
    words = text.split()[:800]
    Path("data").mkdir(exist_ok=True)
    # 4,000 sequences of 35 words are held out, so the text is repeated.
    Path("data/wikitext-2.txt").write_text("\n".join(" ".join(words) for _ in range(190)) + "\n")


def prepare_nanochat(path: Path) -> None:
    """Write a tokenizer and documents for nanochat."""
    import pyarrow
    import pyarrow.parquet
    import tiktoken
    import torch

    special = [
        *("<|bos|>", "<|user_start|>", "<|user_end|>", "<|assistant_start|>", "<|assistant_end|>"),
        *("<|python_start|>", "<|python_end|>", "<|output_start|>", "<|output_end|>"),
    ]
    encoding = tiktoken.Encoding(
        name="bytes",
        pat_str=r"[\s\S]",
        mergeable_ranks={bytes([value]): value for value in range(256)},
        special_tokens={name: 256 + index for index, name in enumerate(special)},
    )
    base = Path("base")
    (base / "tokenizer").mkdir(parents=True, exist_ok=True)
    (base / "tokenizer/tokenizer.pkl").write_bytes(pickle.dumps(encoding))
    sizes = [1] * 256 + [0] * len(special)
    torch.save(torch.tensor(sizes, dtype=torch.int32), base / "tokenizer/token_bytes.pt")
    text = read_text(path)
    documents = [text[start : start + 2000] for start in range(0, len(text), 2000)]
    (base / "base_data_climbmix").mkdir(exist_ok=True)
    for index in range(2):
        table = pyarrow.table({"text": documents[index::2]})
        pyarrow.parquet.write_table(table, base / f"base_data_climbmix/shard_{index:05d}.parquet", row_group_size=16)


if __name__ == "__main__":
    globals()[f"prepare_{sys.argv[1]}"](Path(sys.argv[2]))
