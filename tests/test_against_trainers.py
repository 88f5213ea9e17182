"""What the comparison with other trainers counts as written."""

from benchmarks.trainers.lines import count_lines

RECIPE = '''"""A recipe.

Of two paragraphs.
"""

import torch  # 1


class Net(torch.nn.Module):
    def forward(self, batch):
        return batch


class Mine(Recipe):  # 2
    """What it is."""

    samples = "rows"  # 3

    def data(self, split):
        return torch.ones(3)

    # why
    def model(self):  # 4
        return Net()  # 5
'''


def test_docstrings_comments_and_blank_lines_do_not_count():
    assert count_lines(RECIPE) == 10


def test_a_recipe_without_its_network_and_data():
    assert count_lines(RECIPE, without_network_and_data=True) == 5
