"""Adapters that peft itself makes."""

import torch

from helpers import checkpoints
from llmcond.encoders.checkpoints.adapter import CONFIG


def tune(network, folder, base, seed=0, **config):
    """Put an adapter onto a network with peft, draw its weights, and save it; return the model."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    made = LoraConfig(**{"r": 4, "lora_alpha": 8, "lora_dropout": 0.1, **config})
    model = get_peft_model(network, made).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name or "lora_embedding_A" in name:
                weight.normal_(0, 0.3)
            elif "magnitude" in name:
                weight.mul_(1.3)
            elif "modules_to_save" in name:
                weight.add_(0.2)
    made.base_model_name_or_path = None  # saving would look for it on the hub
    model.save_pretrained(folder, save_embedding_layers=False)
    checkpoints.change_json(folder / CONFIG, base_model_name_or_path=str(base))
    return model
