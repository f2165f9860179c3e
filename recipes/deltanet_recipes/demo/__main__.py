"""`python -m deltanet_recipes.demo FOLDER` runs the demo: convert, align, generate, measure."""

from deltanet_recipes.cpu_threads import settle_threads
from deltanet_recipes.log_bars import hide_bars_in_logs

if __name__ == "__main__":
    settle_threads()
    hide_bars_in_logs()
    from deltanet_hf.exit_codes import run_command
    from deltanet_recipes.demo.run import main

    run_command(main)
