# One image for every role; what a container is, its command says. glibc (slim), since grpcio and NumPy have no fast wheels for musl.
FROM python:3.11-slim

ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1

WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY ps_protocol ps_protocol
COPY ps_server ps_server
COPY chief chief
COPY worker_client worker_client
COPY lockstep lockstep
# [demo]: the workers of docker-compose.yml learn the digits that come with scikit-learn. [certs]: the file makes its own certificates.
RUN pip install '.[demo,certs]'

# Nothing that a role does needs more than an ordinary user, and no file of its own. A new volume has the owner and mode of what it covers.
RUN useradd --create-home --uid 10001 lockstep && install --directory --owner lockstep /checkpoints && \
    install --directory --owner lockstep --mode 0700 /secrets /secrets/ps /secrets/chief /secrets/worker
USER lockstep
WORKDIR /home/lockstep

# `docker run IMAGE status --chief …`; docker-compose.yml names whole commands.
ENTRYPOINT []
CMD ["lockstep", "--help"]
