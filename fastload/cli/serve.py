"""`fastload store serve`: serve the sets of this node to other nodes."""

from __future__ import annotations

import os
from pathlib import Path

import click

from fastload.cli._common import (
    read_certificate,
    read_token,
    serving_options,
    sigterm_raises,
    wait_for_a_signal,
)


@click.command()
@click.option(
    "--root",
    type=click.Path(exists=True, file_okay=False),
    help="Folder of the sets.  [default: $FASTLOAD_STORE, or a folder of this user in shared memory]",
)
@serving_options
@click.option("--insecure", is_flag=True, help="Serve other hosts without a token.")
def serve(
    root: str | None,
    host: str,
    port: int,
    token_file: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    insecure: bool,
) -> None:
    """Serve the sets of this node to other nodes, read only, over Arrow Flight.

    Prints the URL, and runs until Ctrl-C or SIGTERM. A program on another node passes the URL as the source of the
    parts that it lacks: store.get("mnist", parts="all", source="grpc://node7:8815"). It reads the token from the file
    named in $FASTLOAD_TOKEN_FILE. With grpc+tls://, it reads the certificate of the authority from the file named in
    $FASTLOAD_TLS_CA. Any client of Arrow Flight can read the sets too.

    By default, only this host is served. Other hosts need a token. Without TLS, the token can be read on the network.

    \b
    Examples:
        fastload store serve
        head -c 24 /dev/urandom | base64 > token; chmod 600 token
        fastload store serve --host 0.0.0.0 --port 8815 --token-file token --tls-cert cert.pem --tls-key key.pem
    """
    from pyarrow import ArrowException

    from fastload.distributed.flight_access import is_loopback
    from fastload.store.flight import StoreServer
    from fastload.store.root import default_root, open_root

    certificate = read_certificate(tls_cert, tls_key)
    token = read_token(token_file)
    if not token and not insecure and not is_loopback(host):
        raise click.UsageError(
            f"--host {host} without a token lets other hosts read all sets. "
            "Give --token-file, or --insecure to allow that."
        )
    scheme = "grpc+tls" if certificate else "grpc"
    path = open_root(root) if root or os.path.isdir(default_root()) else default_root()
    try:
        server = StoreServer(
            path, f"{scheme}://{host}:{port}", token=token, certificate=certificate
        )
    except (OSError, ValueError, ArrowException) as error:
        raise click.ClickException(f"cannot listen on {host}:{port}: {error}") from error
    with sigterm_raises(), server:
        click.echo(f"{path}: served at {scheme}://{host}:{server.port}")
        wait_for_a_signal()
