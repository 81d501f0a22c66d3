"""`fastload store serve`: serve the sets of this node to other nodes."""

from __future__ import annotations

from typing import Any

import click

from fastload.cli import options as opt
from fastload.cli._common import guards_out_of, serving_options, sigterm_raises, wait_for_a_signal


@click.command()
@click.option(
    "--root",
    type=click.Path(exists=True, file_okay=False),
    help="Folder of the sets.  [default: $FASTLOAD_STORE, or a folder of this user in shared memory]",
)
@serving_options
@opt.flag("--no-token", help="Serve all users of this host, and of others with --host.")
def serve(root: str | None, host: str, port: int, no_token: bool, **options: Any) -> None:
    """Serve the sets of this node to other nodes, read only, over Arrow Flight.

    Prints the URL, and runs until Ctrl-C or SIGTERM. A program on another node passes the URL as the source of the
    parts that it lacks: store.get("mnist", parts="all", source="grpc://node7:8815"). It reads the token from the file
    named in $FASTLOAD_TOKEN_FILE. With grpc+tls://, it reads the certificate of the authority from the file named in
    $FASTLOAD_TLS_CA. Any client of Arrow Flight can read the sets too.

    Callers need the token in --token-file, or else every user of this host could read all sets. By default, only this
    host is served. Without TLS, the token can be read on the network.

    \b
    Examples:
        fastload store serve --no-token
        head -c 24 /dev/urandom | base64 > token; chmod 600 token
        fastload store serve --host 0.0.0.0 --port 8815 --token-file token --tls-cert cert.pem --tls-key key.pem
    """
    from pyarrow import ArrowException

    from fastload.store.flight import StoreServer
    from fastload.store.root import existing_root

    guards = guards_out_of(options)
    if not guards["token"] and not no_token:
        raise click.UsageError(
            "without a token, all users of this host could read all sets, even those in a folder that only you can "
            "open. Give --token-file, or --no-token to allow that."
        )
    path = existing_root(root)
    try:
        server = StoreServer(path, host, port, **guards)
    except (OSError, ValueError, ArrowException) as error:
        raise click.ClickException(f"cannot listen on {host}:{port}: {error}") from error
    with sigterm_raises(), server:
        click.echo(f"{path}: served at {server.address(host)}")
        wait_for_a_signal()
