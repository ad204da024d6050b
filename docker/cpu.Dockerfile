# llmcond on a CPU, with the bundled models and the server:
#   docker build --file docker/cpu.Dockerfile --tag llmcond .
#   docker run --publish 127.0.0.1:8000:8000 llmcond serve --host 0.0.0.0
FROM python:3.13-slim
WORKDIR /source
COPY . .
# PyPI has PyTorch with CUDA only, which takes several gigabytes.
RUN pip install --no-cache-dir --extra-index-url https://download.pytorch.org/whl/cpu \
    --constraint constraints.txt '.[demo,serve]' && rm -r /source/*
RUN useradd --create-home --uid 1000 llmcond
USER 1000
WORKDIR /home/llmcond
ENTRYPOINT ["llmcond"]
CMD ["--help"]
