# llmcond on an NVIDIA GPU, with 8 and 4 bit weights, training and the server:
#   docker build --file docker/cuda.Dockerfile --tag llmcond-cuda .
#   docker run --gpus all --volume "$PWD:/home/llmcond" llmcond-cuda extract --model nvidia/NV-Embed-v2
# PyTorch's wheels bring CUDA's libraries, so the host only needs the driver and NVIDIA's container toolkit.
FROM python:3.13-slim
WORKDIR /source
COPY . .
# hadolint ignore=DL3013
RUN pip install --no-cache-dir '.[demo,lora,quantize,report,serve]' && rm -r /source/*
RUN useradd --create-home --uid 1000 llmcond
USER 1000
WORKDIR /home/llmcond
ENTRYPOINT ["llmcond"]
CMD ["--help"]
