"""Recipes: includes, flags in order, and what a file may not say."""

import pytest

from megatron_hbp.recipe import flag_words, read_recipe, with_gpus

CLUSTER = '[cluster]\ngpus = 8\ndevice = "h100-80gb"\n'


@pytest.fixture
def write(tmp_path):
    def written(text, name="recipe.toml"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return written


def test_a_whole_recipe(write, tmp_path):
    recipe = read_recipe(
        write(
            'title = "A run"\n'
            + CLUSTER
            + 'gpus_per_node = 4\ntransformer_engine = "2.9"\n'
            + '[published]\nparameters = 8e9\nactive_parameters = 1\nsource = "a card"\n'
            + '[data]\nlengths = "some/lengths.csv"\nselect = "hbp select"\n'
            + "[flags]\nnum-layers = 4\n",
            "mine.toml",
        )
    )
    assert (recipe.name, recipe.title) == ("mine", "A run")
    assert (recipe.gpus, recipe.gpus_per_node) == (8, 4)
    assert (recipe.device, recipe.transformer_engine) == ("h100-80gb", "2.9")
    assert (recipe.parameters, recipe.active_parameters, recipe.source) == (8e9, 1, "a card")
    assert recipe.lengths == tmp_path / "some/lengths.csv"
    assert recipe.select == "hbp select"
    assert recipe.command_line() == ["--num-layers", "4"]


def test_the_least_recipe(write):
    recipe = read_recipe(write(CLUSTER))
    assert (recipe.title, recipe.gpus_per_node, recipe.parameters) == ("recipe", 8, None)
    assert recipe.flags == {}
    assert recipe.lengths is None


def test_what_a_file_says_wins_over_what_it_includes(write):
    write('[flags]\nlr = 1.0\nmin-lr = 0.5\n[cluster]\ngpus = 2\ndevice = "x"\n', "below.toml")
    write("[flags]\nlr = 2.0\nswiglu = true\n", "beside.toml")
    recipe = read_recipe(
        write('include = ["below.toml", "beside.toml"]\n' + CLUSTER + "[flags]\nlr = 3.0\n")
    )
    assert recipe.gpus == 8
    # in the order of the files, each once, at the place of the first
    assert recipe.command_line() == ["--lr", "3.0", "--min-lr", "0.5", "--swiglu"]


def test_includes_of_includes_are_beside_their_own_file(write):
    write("[flags]\nnum-layers = 4\n", "parts/deep/model.toml")
    write('include = ["deep/model.toml"]\n[data]\nlengths = "l.csv"\n', "parts/all.toml")
    recipe = read_recipe(write('include = ["parts/all.toml"]\n' + CLUSTER))
    assert recipe.command_line() == ["--num-layers", "4"]
    assert recipe.lengths == recipe.path.parent / "parts" / "l.csv"


def test_the_title_of_an_include_is_kept_unless_there_is_an_own_one(write):
    write('title = "below"\n', "below.toml")
    assert read_recipe(write('include = ["below.toml"]\n' + CLUSTER)).title == "below"
    own = 'include = ["below.toml"]\ntitle = "own"\n' + CLUSTER
    assert read_recipe(write(own)).title == "own"


def test_words_of_every_kind_of_value():
    flags = {
        "a": True,
        "b": False,
        "c": 1,
        "d": 1e-5,
        "e": "([0]*1+[1]*3)",
        "f": ["x", 2],
        "hbp-level": ["64:1", "128:2"],
    }
    assert flag_words(flags) == [
        *("--a", "--c", "1", "--d", "1e-05", "--e", "([0]*1+[1]*3)", "--f", "x", "2"),
        *("--hbp-level", "64:1", "--hbp-level", "128:2"),
    ]


def test_a_flag_of_dashes_and_underscores_is_kept(write):
    recipe = read_recipe(write(CLUSTER + "[flags]\noverride-opt_param-scheduler = true\n"))
    assert recipe.command_line() == ["--override-opt_param-scheduler"]


def test_flags_added_later_win_and_come_last(write):
    recipe = read_recipe(write(CLUSTER + "[flags]\nlr = 1.0\nbf16 = true\nseed = 1\n"))
    assert recipe.command_line(["--lr=2.0", "--seed", "7"]) == ["--bf16", "--lr=2.0", "--seed", "7"]


def test_other_numbers_of_gpus(write):
    recipe = read_recipe(write(CLUSTER))
    assert with_gpus(recipe, None) is recipe
    assert with_gpus(recipe, 16).gpus == 16
    with pytest.raises(ValueError, match="--gpus is 0; give a whole number of 1 or more"):
        with_gpus(recipe, 0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("gpus = 8\n", r"'gpus' is unknown; a recipe has include, title, \[cluster\]"),
        ("[cluster]\ngpus = 8\n", r"device is missing in \[cluster\]; add it"),
        ('[cluster]\ndevice = "x"\n', r"gpus is missing in \[cluster\]; add it"),
        (CLUSTER + "nodes = 2\n", r"'nodes' is unknown in \[cluster\]; it has gpus, gpus_per"),
        ('[cluster]\ngpus = "8"\ndevice = "x"\n', r"gpus is '8' in \[cluster\]; give a whole"),
        ('[cluster]\ngpus = true\ndevice = "x"\n', r"gpus is True in \[cluster\]; give a whole"),
        ('[cluster]\ngpus = 0\ndevice = "x"\n', r"gpus is 0; give a whole number of 1 or more"),
        (CLUSTER + "gpus_per_node = 0\n", r"gpus_per_node is 0; give a whole number of 1"),
        (CLUSTER + '[published]\nparameters = "8B"\n', r"parameters is '8B'.*give a number"),
        (CLUSTER + '[flags]\n"--lr" = 1\n', r"flag '--lr'; write it without dashes.*: lr"),
        (CLUSTER + "[flags]\nmin_lr = 1\n", r"flag 'min_lr'; .*for underscores: min-lr"),
        (CLUSTER + "[flags]\nlr = []\n", r"flag lr is \[\]; give a text, a number, true, false"),
        (CLUSTER + "[flags]\nlr = [true]\n", r"flag lr is \[True\]; give a text"),
        (CLUSTER + "[flags.lr]\na = 1\n", r"flag lr is \{'a': 1\}; give a text"),
        (CLUSTER + "[flags]\nlr = 1979-05-27\n", r"flag lr is datetime.date.*; give a text"),
        ("flags = 3\n" + CLUSTER, r"flags is 3; make it a table \[flags\]"),
        ('include = "a.toml"\n' + CLUSTER, r"include is 'a.toml'; give a list of files"),
        ('include = ["a.toml"]\n' + CLUSTER, r"includes a.toml, which is no file beside it"),
        ('include = ["recipe.toml"]\n' + CLUSTER, r"includes go round in a circle; take one out"),
        ("title = 3\n" + CLUSTER, r"title is 3; give a text"),
        (CLUSTER + "[flags]\nlr = \n", r"cannot be read: .*line 5"),
    ],
)
def test_what_a_recipe_may_not_say(write, text, said):
    path = write(text)
    with pytest.raises(ValueError, match=said) as caught:
        read_recipe(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ValueError, match=r"none.toml is no file; give a path such as examples/"):
        read_recipe(tmp_path / "none.toml")


def test_a_device_file_beside_the_recipe(write, tmp_path):
    (tmp_path / "gpu.json").write_text("{}")
    recipe = read_recipe(write('[cluster]\ngpus = 8\ndevice = "gpu.json"\n'))
    assert recipe.device == str(tmp_path / "gpu.json")
