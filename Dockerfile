# fakedist without a GPU, also on macOS and Windows: docs/install.md has the two commands.
FROM python:3.12-slim-bookworm

# gcc builds the virtual GPU's driver at first use; Inductor compiles with g++.
RUN apt-get update \
    && apt-get install --no-install-recommends --yes gcc=4:12.* g++=4:12.* libc6-dev=2.36-* \
    && rm -rf /var/lib/apt/lists/*

# The PyPI file of torch for Linux on x86-64 is a CUDA build: 5.6 GB, in a layer of its own.
ARG TORCH=2.15.0
RUN pip install --no-cache-dir "torch==${TORCH}"

COPY pyproject.toml README.md LICENSE NOTICE /src/
COPY fakedist /src/fakedist
RUN pip install --no-cache-dir /src

RUN useradd --create-home --uid 1000 fakedist && mkdir /cache /work && chown fakedist:fakedist /cache /work
USER 1000
# Built drivers and what Inductor and Triton compiled, kept from one container to the next.
ENV FAKEDIST_CACHE=/cache/fakedist TORCHINDUCTOR_CACHE_DIR=/cache/inductor TRITON_CACHE_DIR=/cache/triton
VOLUME /cache
WORKDIR /work
ENTRYPOINT ["fakedist"]
CMD ["--help"]
