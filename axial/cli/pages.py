"""Where what was counted or measured goes: a bar meanwhile, then --json, and --markdown's block of a page.

Scripts of experiments/ use it too, with flags of their own.
"""

from absl import flags

from axial.io.show import plain, progress, say
from axial.io.write import write_block, write_json

FLAGS = flags.FLAGS


def report(line):
    """Prints a line on what is done, which is no result."""
    say(line, error=True)


def counted(count, total=None):
    """count(progress), behind a progress bar on standard error; progress is a function of (done, of, name)."""
    bar = progress(total=total, unit="model")

    def step(done, of, name):
        bar.total = of
        bar.set_postfix_str(plain(name), refresh=False)
        bar.update(done - bar.n)

    results = count(step)
    bar.close()
    return results


def finish(result):
    """Writes --json if it is given."""
    if FLAGS.json:
        write_json(FLAGS.json, result)


def write_page(page, results, markdown):
    """Writes --json and --markdown.

    Args:
        page: name of the block of --markdown.
        results: list of what has `to_json`.
        markdown: function of the results that returns the block.
    """
    finish([result.to_json() for result in results])
    if FLAGS.markdown:
        write_block(FLAGS.markdown, page, markdown(results))
