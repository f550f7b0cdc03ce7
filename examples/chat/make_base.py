"""Write a small untrained Llama with a tokenizer and a chat template, and conversations about sums, into a directory.

No weights are shipped: the tutorial trains this base. Usage: python make_base.py DIRECTORY
"""

import json
import random
import sys
from pathlib import Path

import tokenizers
import transformers

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTROL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
GREETINGS = {
    "Hello": "Hello! Ask me for a sum.",
    "Thanks": "You are welcome.",
    "Who are you?": "A small model of sums.",
}


def ask(a: int, b: int, answer: int, rng: random.Random) -> list[dict[str, str]]:
    """Make a question about a + b and an answer to it."""
    question = rng.choice(["What is {} plus {}?", "{} + {} = ?", "Add {} and {}."]).format(a, b)
    return [{"role": "user", "content": question}, {"role": "assistant", "content": str(answer)}]


def make_records(rng: random.Random) -> dict[str, list[dict[str, object]]]:
    """Make conversations with some wrong answers, pairs of a sentence and a bare number, and questions for rewards."""
    sums = [(a, b) for a in range(10) for b in range(10)]
    chats, pairs = [], []
    for _ in range(3000):
        greeting = rng.choice(list(GREETINGS))
        a, b = rng.choice(sums)
        wrong = a + b + rng.choice([0, 0, 0, 1, -1])
        talk = [{"role": "user", "content": greeting}, {"role": "assistant", "content": GREETINGS[greeting]}]
        chats.append({"messages": (talk if rng.random() < 0.3 else []) + ask(a, b, wrong, rng)})
    for a, b in sums * 4:
        question, right = ask(a, b, a + b, rng)
        sentence = {**right, "content": f"{a} plus {b} is {a + b}."}
        pairs.append({"prompt": [question], "chosen": [sentence], "rejected": [right]})
    questions = [{"messages": ask(a, b, a + b, rng)} for a, b in sums * 4]
    return {"chat": chats, "pairs": pairs, "questions": questions}


def main(folder: Path) -> None:
    """Write the model to `folder`/base and the records next to it."""
    rng = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    records = make_records(rng)
    for name, rows in records.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    digits = tokenizers.pre_tokenizers.Digits(individual_digits=False)
    pieces = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([digits, pieces])
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=CONTROL_TOKENS,
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((json.dumps(row) for row in records["chat"]), trainer)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder / "base")
    transformers.set_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(fast),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=fast.eos_token_id,
        pad_token_id=fast.pad_token_id,
        tie_word_embeddings=True,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "base")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
