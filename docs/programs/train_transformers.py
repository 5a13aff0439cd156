"""Train a small GPT-2 on all ranks by transformers; a second start continues from the last save."""

from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import mpistrat.torch as mt

mt.init_process_group()
arguments = TrainingArguments(
    "saved",
    use_cpu=True,
    bf16=True,
    num_train_epochs=2,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=2,
    max_grad_norm=1.0,
    dataloader_num_workers=1,
    eval_strategy="steps",
    eval_steps=5,
    save_steps=5,
    logging_steps=5,
    seed=1,
    report_to=[],
    disable_tqdm=True,
)


class Sentences(Dataset):
    """Random words, each of which comes twice."""

    def __init__(self, count, seed):
        words = torch.randint(50, (count, 6), generator=torch.Generator().manual_seed(seed))
        self.words = words.repeat_interleave(2, dim=1)

    def __len__(self):
        return len(self.words)

    def __getitem__(self, index):
        return {"input_ids": self.words[index], "labels": self.words[index]}


set_seed(arguments.seed)
config = GPT2Config(vocab_size=50, n_positions=12, n_embd=32, n_layer=1, n_head=2)
trainer = Trainer(
    GPT2LMHeadModel(config),
    arguments,
    train_dataset=Sentences(256, seed=0),
    eval_dataset=Sentences(64, seed=1),
)
is_continued = any(Path("saved").glob("checkpoint-*"))
result = trainer.train(resume_from_checkpoint=is_continued)
metrics = trainer.evaluate()
predictions = trainer.predict(trainer.eval_dataset).predictions
if trainer.is_world_process_zero():
    print("train:", result.global_step, result.training_loss)
    print("evaluate:", metrics["eval_loss"])
    print("predict:", len(predictions), abs(predictions).sum())
