"""Fine-tunes a converted model on conversations with TRL's SFTTrainer and LoRA (`pip install trl peft`).

    python examples/trl_sft.py MODEL DATA.jsonl OUT [STEPS]

A line of DATA.jsonl is {"prompt": ..., "completion": ...} or {"messages": [...]}.
"""

from __future__ import annotations

import sys

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from deltanet_hf import cache_bits_of, set_cache_bits

CPU = not torch.cuda.is_available()


def main(model: str, data: str, out: str, steps: str = "200") -> None:
    student, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    bits = cache_bits_of(student)
    set_cache_bits(student, 16)  # batches are padded, which training in 4 bits refuses
    trainer = SFTTrainer(
        model=student,
        args=SFTConfig(
            output_dir=f"{out}/trainer", max_steps=int(steps), learning_rate=2e-4, report_to="none", use_cpu=CPU
        ),
        train_dataset=load_dataset("json", data_files=data, split="train"),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=16),
    )
    print(f"loss {trainer.train().training_loss:.3f}")
    set_cache_bits(trainer.model.merge_and_unload(), bits).save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    main(*sys.argv[1:])
