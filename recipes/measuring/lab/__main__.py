"""`python -m measuring.lab parity|s3|s5|mqar`: who tracks what, and who recalls how many pairs.

Example: `python -m measuring.lab s3 --mixer gated_deltanet --mixer
deltaproduct:num_householder=2,allow_neg_eigval=true`.
"""

from deltanet_recipes.cpu_threads import settle_threads

if __name__ == "__main__":
    settle_threads()
    import typer

    from deltanet_hf.exit_codes import run_command
    from measuring.lab.command import main

    run_command(lambda: typer.run(main))
