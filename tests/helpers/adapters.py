"""Adapters created by peft."""

import torch

from helpers import checkpoints
from llmcond.encoders.adapter import CONFIG


def save_adapter(network, folder, base, seed=0, **config):
    """Add an adapter with random weights to a network by peft, save it, and return the model."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    lora_config = LoraConfig(**{"r": 4, "lora_alpha": 8, "lora_dropout": 0.1, **config})
    model = get_peft_model(network, lora_config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_B" in name or "lora_embedding_A" in name:
                weight.normal_(0, 0.3)
            elif "magnitude" in name:
                weight.mul_(1.3)
            elif "modules_to_save" in name:
                weight.add_(0.2)
    lora_config.base_model_name_or_path = None  # otherwise saving would look for it on the hub
    model.save_pretrained(folder, save_embedding_layers=False)
    checkpoints.change_json(folder / CONFIG, base_model_name_or_path=str(base))
    return model
