"""The studies of the reproduction as data: which methods, on which federation, with which options.

Options are words of `fedld` commands. DATA, WEIGHTS and WEIGHTS2 stand for paths; `run.py` fills them in.
"""

from dataclasses import dataclass

Words = tuple[str, ...]

PAPER = ("--momentum", "0.5", "--set", "weight_decay=5e-4", "--batch-size", "50")
HEAD = (
    *("--image-size", "96", "--model", "mobilenet_v2", "--head", "mlp:64", "--momentum", "0.5"),
    *("--batch-size", "50", "--set", "client_losses=false", "--weights", "WEIGHTS"),
)
"""A pretrained trunk and a head of 64 units on its cached features."""
ONLY_HEAD = ("--train", "head", "--rounds", "20")
TERMS = ("--decompose", "20", "--decompose-samples", "100")
TEN = "0,1,2,3,4,5,6,7,8,9"

RULES = "fedavg,fedld,consensus,fedld-consensus"
TABLE1 = "fedavg,fedprox,fedbn,fedpac,fedgh,fedld,consensus"
SMALL = f"{TABLE1},fedld-consensus,fedld-tensor,fedld-smooth,fedld-official,local,central"
FEW = "fedavg,scaffold,fedexp,fedld,measured,fedld-measured,fedld-drift,central"
MAIN = (
    "local,fedavg,fedprox,scaffold,feddyn,fedexp,fedacg,moon,fedlc,fedrs,fedsam,feddisco,fedga,fedrod,fedpac,"
    "fedgh,fedld,consensus,fedld-consensus,measured,fedld-measured,fedld-drift,central"
)
TABLE3 = "fedavg,fedprox,fedpac,fedgh,scaffold,fedld,consensus,fedld-measured,fedld-drift,central"
LONG = "fedavg,fedprox,fedpac,fedgh,scaffold,fedld,fedld-official,fedld-measured,fedld-drift,central"
"""FedBN is left out: a head has no BatchNorm, so it is FedAvg to the last digit."""
WHOLE = "fedavg,scaffold,fedld,fedld-official,fedld-drift"
BLOCKS = "fedavg,fedprox,scaffold,feddyn,fedexp,fedld,consensus,fedld-measured,fedld-drift,central"
WITH_MARGIN = ("fedld", "fedld-consensus", "fedld-measured", "fedld-drift")


@dataclass(frozen=True, kw_only=True)
class Federation:
    """A data set and how it is dealt; the paper's lambda and the learning rates that are tried on it."""

    file: str
    partition: Words
    lam: float = 0.03
    rates: tuple[float, ...] = (0.001, 0.003, 0.01, 0.03, 0.1)
    shared_rate: float = 0.01
    paper_rate: float = 0.01
    tuning_seeds: str = "0,1"
    primary: str = "accuracy"  # validation images of the published lists are 71 % diseased: AUROC there

    @property
    def dataset(self) -> Words:
        """Options of the data."""
        return ("--dataset", f"npz:DATA/{self.file}/{self.file}.npz", *self.partition)


def _dirichlet(file: str, alpha: str) -> Federation:
    return Federation(file=file, partition=("--partition", "dirichlet", "--clients", "5", "--alpha", alpha))


def _published(number: int, lam: float) -> Federation:
    partition = ("--partition", f"column:sslfl_split{number}")
    return Federation(file="retina_kaggle96", partition=partition, lam=lam, primary="auroc")


ALPHAS = ("100", "10", "1", "0.5", "0.1", "0.05")
FEDERATIONS = {
    "covid": Federation(
        file="covidfl96",
        partition=("--partition", "site"),
        lam=0.01,
        rates=(0.003, 0.01, 0.03, 0.1, 0.3),
        shared_rate=0.03,
        paper_rate=0.005,
        tuning_seeds="0",
    ),
    "retina-split1": _published(1, 0.1),
    "retina-split2": _published(2, 0.03),
    "retina-split3": _published(3, 0.03),
    "fundus-source": Federation(
        file="fundus_multisite96", partition=("--partition", "column:source"), lam=0.01
    ),
    **{f"retina-dirichlet{alpha}": _dirichlet("retina_kaggle96", alpha) for alpha in ALPHAS},
    **{f"fundus-dirichlet{alpha}": _dirichlet("fundus_multisite96", alpha) for alpha in ALPHAS},
}
DIFFERENT = ("covid", "retina-dirichlet0.1", "fundus-dirichlet0.5")
EVERY = (
    *DIFFERENT,
    *("retina-split1", "retina-split2", "retina-split3"),
    *("fundus-dirichlet1", "fundus-dirichlet0.1", "fundus-source"),
)


@dataclass(frozen=True, kw_only=True)
class Search:
    """Values of a setting that `fedld tune` tries for every method on held-out training images."""

    name: str  # of the search; the method's name follows
    options: Words
    rates: tuple[float, ...]
    strengths: bool = False  # then also lambda or mu, at the best rate
    lam: float | None = None  # of margin control while rates are tried


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Options that are tried at several learning rates; the best choice goes into the comparison."""

    name: str
    options: Words
    rates: tuple[float, ...]
    chosen: Words = ()


@dataclass(frozen=True, kw_only=True)
class Study:
    """One `fedld` command, and the search that comes before it."""

    name: str
    command: Words
    methods: str = ""
    search: Search | None = None  # of every method's settings
    choices: tuple[Choice, ...] = ()  # of settings of all methods together


LAMBDAS = (0.003, 0.01, 0.03, 0.1)
MUS = (0.001, 0.01, 0.1, 1)


def margin(lam: str) -> str:
    """Return margin control of a strength, as an objective.

    >>> margin("0.03")
    '{name="marg-log",lam=0.03}'
    """
    return f'{{name="marg-log",lam={lam}}}'


def head_study(
    on: str,
    kind: str,
    methods: str,
    *options: str,
    search: Search | None = None,
    choices: tuple[Choice, ...] = (),
) -> Study:
    """Return a study with the pretrained trunk; methods with margin control take the paper's lambda."""
    federation = FEDERATIONS[on]
    margins: list[str] = []
    for name in WITH_MARGIN:
        if name in methods.split(","):  # a study refuses settings of other methods
            margins += ["--set", f"{name}.objective={margin(f'{federation.lam:g}')}"]
    command = ("compare", *HEAD, *federation.dataset, *margins, *options)
    return Study(name=f"{on}-{kind}", command=command, methods=methods, search=search, choices=choices)


PRIVATE = ("--head", "linear", "--train", "head", "--rounds", "20")
"""A linear head on features as the trunk gives them: private runs may not standardise them."""


def private_study(on: str, level: str) -> Study:
    """Return FedAvg at a privacy level: `plain` or an epsilon; rate and clip are chosen by a search."""

    def choice(name: str, rates: tuple[float, ...], *chosen: str) -> Choice:
        options = (*HEAD, *FEDERATIONS[on].dataset, *PRIVATE, "--workers", "0", "--seeds", "0", *chosen)
        return Choice(name=f"{on}-private-{name}", options=options, rates=rates, chosen=chosen)

    if level == "plain":
        kind = "private-plain"
        choices = [choice("plain", (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1), "--no-standardise")]
    else:
        kind = f"private-epsilon{level}"
        little_noise = on == "covid" and level in ("8", "4")  # so that steps may be larger
        low = {"1": 0.1, "10": 0.01} if little_noise else {"1": 0.01, "10": 0.001}
        choices = [
            choice(
                f"epsilon{level}-clip{clip}",
                tuple(float(f"{factor * rate:g}") for factor in (1, 3, 10, 30)),
                *("--dp", f"epsilon={level},delta=1e-5,clip={clip}"),
            )
            for clip, rate in low.items()
        ]
    return head_study(on, kind, "fedavg", *PRIVATE, "--seeds", "0,1,2", choices=tuple(choices))


def paper_study(data: str, table: str, rounds: int, *options: str, methods: str = "") -> Study:
    """Return a table of the paper with the pretrained trunk, at the middle rate."""
    federation = FEDERATIONS["covid" if data == "covid" else f"{data}-dirichlet0.5"]
    command = (
        *("reproduce", table, *HEAD, "--train", "head", *federation.dataset[:2], "--seeds", TEN),
        *("--lr", f"{federation.shared_rate:g}", "--set", "weight_decay=0", "--rounds", f"{rounds}"),
        *("--decompose", f"{rounds}", "--decompose-samples", "100", *options),
    )
    return Study(name=f"{data}-head-{table}", command=command, methods=methods)


def _search(on: str, kind: str, how: Words, strengths: bool, rates: tuple[float, ...] = ()) -> Search:
    federation = FEDERATIONS[on]
    return Search(
        name=f"{on}-{kind}",
        options=(
            *HEAD,
            *federation.dataset,
            *how,
            *("--workers", "0", "--seeds", federation.tuning_seeds, "--primary", federation.primary),
        ),
        rates=rates or federation.rates,
        strengths=strengths,
        lam=federation.lam,
    )


def small_study(name: str, table: str, file: str, methods: str, *options: str, **more: Search) -> Study:
    """Return a table of the paper with small networks from scratch."""
    command = ("reproduce", table, "--dataset", f"npz:DATA/{file}/{file}.npz", *PAPER, *options)
    return Study(name=name, command=command, methods=methods, **more)


COVID_SMALL = (
    *("--splits", "covid-fl", "--image-size", "24", "--rounds", "25"),
    *("--decompose", "25", "--decompose-samples", "40"),
)
FUNDUS_SMALL = ("--image-size", "24", "--rounds", "20", *TERMS)
FUNDUS = "fundus_multisite96"


def _retina_rules(lr: str, methods: str) -> Study:
    command = (
        *(
            "compare",
            "--dataset",
            "npz:DATA/retina_kaggle96/retina_kaggle96.npz",
            *PAPER,
            "--model",
            "resnet8",
        ),
        *("--image-size", "32", "--partition", "dirichlet", "--set", "alpha=0.5", "--clients", "5"),
        *("--rounds", "20", "--lr", lr, "--seeds", "0,1,2", "--set", "client_losses=false", *TERMS),
    )
    return Study(name=f"retina-rules-lr{lr}", command=command, methods=methods)


def _figure2(data: str) -> Study:
    federation = FEDERATIONS["covid" if data == "covid" else f"{data}-dirichlet1"]
    command = (
        *("reproduce", "figure2", *HEAD, "--train", "head", *federation.dataset[:2], "--clients", "5"),
        *("--lr", "0.01", "--set", f"objective={margin(f'{federation.lam:g}')}", "--seeds", TEN),
    )
    return Study(name=f"figure2-{data}-head", command=command)


CLOSED = ("--head", "linear", "--train", "head", "--rounds", "1")
RANDOM = ("--seeds", TEN, "--set", "ridge.features=random:4096")
TRUNK2 = ("--model", "efficientnet_lite0", "--weights", "WEIGHTS2", *CLOSED)
ALIKE = ("--partition", "iid", "--set", "client_losses=false")

LONG_RUN = (
    *("--train", "head", "--rounds", "200", "--eval-every", "5"),
    *("--decompose", "200", "--decompose-samples", "100"),
)
WHOLE_48 = ("--image-size", "48", "--head", "linear", "--train", "all", "--buffers", "frozen")
PAPER_FEDERATIONS = ("covid", "retina-split1", "retina-split2", "retina-split3")

CENTRED = (
    *("--head", "linear", "--train", "last:4", "--buffers", "frozen", "--start", "closed"),
    *("--steps", "centred", "--momentum", "0", "--local-steps", "4", "--lr", "0.001"),
    *("--set", "scaffold.beta=0.9", "--set", "fedavgm.eta=1", "--rounds", "60", "--eval-every", "5"),
    *("--decompose", "60", "--decompose-samples", "40"),
)

VARIANTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "scaffold": ("scaffold", ()),
    "fedavgm": ("fedavgm", ()),
    "margin-1e-2": ("scaffold", (f"objective={margin('0.01')}",)),
    "margin-1e-1": ("scaffold", (f"objective={margin('0.1')}",)),
    "clip-5": ("scaffold", ("clip_gradients=5",)),
    "head-rate-3e-4": ("scaffold", ("head_lr=0.0003",)),
    "cosine": ("scaffold", ("lr_schedule=cosine",)),
    "steps-2": ("scaffold", ("local_steps=2",)),
    "steps-8-half-rate": ("scaffold", ("local_steps=8", "lr=0.0005")),
    "uniform": ("scaffold", ("client_weights=uniform",)),
    "adamw-1e-4": ("scaffold", ("steps=plain", "optimiser=adamw", "lr=0.0001")),
    "proximal-1e-1": ("fedprox", ("mu=0.1",)),
    "fedlin": ("fedlin", ()),
    "fedld-drift": ("fedld-drift", ()),
    "fedld-measured": ("fedld-measured", ()),
    "pooled-plain": ("central", ("local_steps=48", "momentum=0.5", "lr=0.003", "steps=plain")),
    "pooled-centred": ("central", ("local_steps=48", "momentum=0.9")),
}
"""Changes of the recipe for the last four blocks: a label, the method, and settings that differ."""
VARIANT_SETTINGS = (
    *("--rounds", "30", "--decompose", "30", "--hold-out", "0.2", "--seeds", "0"),
    *(
        word
        for label, (_, settings) in VARIANTS.items()
        for setting in settings
        for word in ("--set", f"{label}.{setting}")
    ),
)

PARTS: dict[str, list[Study]] = {
    # Accuracy against five learning rates; at 0.3 pooled training diverges. 63 minutes of one core.
    "sensitivity_rate": [
        head_study(
            on,
            f"head-lr{rate:g}",
            FEW.removesuffix(",central") if rate == 0.3 else FEW,
            *(*ONLY_HEAD, "--lr", f"{rate:g}", "--seeds", TEN),
        )
        for on in DIFFERENT
        for rate in FEDERATIONS[on].rates
    ],
    # Accuracy against heterogeneity, at one rate. 156 minutes.
    "sensitivity_alpha": [
        head_study(f"{data}-dirichlet{alpha}", "head-lr0.01", FEW, *ONLY_HEAD, "--lr", "0.01", "--seeds", TEN)
        for data in ("fundus", "retina")
        for alpha in ALPHAS
    ],
    # Every method at its own rate, and at that rate its own lambda or mu. 30 minutes on X-rays, 12 elsewhere.
    "tuned_heads": [
        head_study(
            on,
            "head-tuned",
            MAIN,
            *(*ONLY_HEAD, "--seeds", TEN, *TERMS),
            search=_search(on, "head", ONLY_HEAD, strengths=True),
        )
        for on in EVERY
    ],
    # The same at one rate for all. 14 minutes on X-rays, 6 elsewhere.
    "shared_heads": [
        head_study(
            on,
            "head-shared",
            MAIN,
            *(*ONLY_HEAD, "--seeds", TEN, *TERMS, "--lr", f"{FEDERATIONS[on].shared_rate:g}"),
        )
        for on in EVERY
    ],
    # Methods in closed form, one round: linear ones once, since neither seed nor partition changes them.
    "closed_heads": [
        study
        for on in EVERY
        for study in (
            head_study(on, "head-closed", "ridge,lda", *CLOSED, "--seeds", "0"),
            head_study(
                on,
                "head-balanced",
                "ridge,lda",
                *(*CLOSED, "--seeds", "0", "--set", "ridge.balanced=true", "--set", "lda.balanced=true"),
            ),
            head_study(on, "head-random", "ridge", *CLOSED, *RANDOM),
        )
    ],
    # The same on chest X-rays with another trunk, EfficientNet-Lite0.
    "closed_trunk2": [
        head_study("covid", "efficientnet-closed", "ridge,lda", *TRUNK2, "--seeds", "0"),
        head_study("covid", "efficientnet-random", "ridge", *TRUNK2, *RANDOM),
    ],
    # The paper's Table 2 on the published lists, on Dirichlet 100, 1 and 0.5, and on COVID-FL. 17 minutes.
    "table2_heads": [
        paper_study(
            data,
            "table2",
            20,
            *("--splits", "covid-fl" if data == "covid" else "retina-split1,retina-split2,retina-split3"),
        )
        for data in ("retina", "fundus", "covid")
    ],
    # Its Table 3: 50 clients of Dirichlet 0.5, five of them in each round. 4 minutes each.
    "table3_heads": [
        paper_study(data, "table3", 100, methods=TABLE3) for data in ("fundus", "retina", "covid")
    ],
    # Figure 2 from the pretrained trunk with a new head. 5 minutes each.
    "figure2_heads": [_figure2(data) for data in ("fundus", "retina", "covid")],
    # The last four blocks trained too; BatchNorm's statistics stay (averaged ones ended 9 points lower on
    # validation images). 105 minutes.
    "last4": [
        head_study(
            "covid",
            "last4",
            BLOCKS,
            *("--train", "last:4", "--buffers", "frozen", "--rounds", "15", "--seeds", "0,1,2,3,4"),
            *("--decompose", "15", "--decompose-samples", "40"),
            search=_search(
                "covid",
                "last4",
                ("--train", "last:4", "--buffers", "frozen", "--rounds", "10"),
                strengths=False,
                rates=(0.001, 0.003, 0.01),
            ),
        )
    ],
    # The same blocks from a closed start with centred steps. Two minutes of a core for each run.
    "last4_centred": [
        head_study("covid", "last4-centred", "fedavg,scaffold,fedavgm", *CENTRED, "--seeds", "0,1,2,3,4"),
    ],
    # Changes of that recipe, one at a time, on held-out training images. A minute for each run.
    "last4_variants": [
        Study(
            name="covid-last4-variants",
            command=("compare", *HEAD, *FEDERATIONS["covid"].dataset, *CENTRED, *VARIANT_SETTINGS),
            methods=",".join(f"{label}={method}" for label, (method, _) in VARIANTS.items()),
        )
    ],
    # The same with the mean of the rounds' models as the final one; the decay was chosen on held-out images.
    "last4_averaged": [
        head_study(
            "covid",
            "last4-averaged",
            "fedavg,scaffold,fedavgm",
            *(*CENTRED, "--average-models", "0.9", "--seeds", "0,1,2,3,4"),
        ),
    ],
    # Two hundred rounds, as in the paper and at its rates. On X-rays a run takes 15 to 75 seconds of a core.
    "long_heads": [
        head_study(
            on,
            "head-rounds200",
            LONG,
            *(*LONG_RUN, "--lr", f"{FEDERATIONS[on].paper_rate:g}", "--seeds", "0,1,2,3,4"),
        )
        for on in PAPER_FEDERATIONS
    ],
    # The same with every method at its own rate, chosen after as many rounds.
    "long_tuned_heads": [
        head_study(
            on,
            "head-rounds200-tuned",
            LONG,
            *(*LONG_RUN, "--seeds", TEN),
            search=_search(
                on,
                "head-rounds200",
                ("--train", "head", "--rounds", "200", "--eval-every", "100"),
                strengths=False,
                rates=(0.001, 0.003, 0.01, 0.03, 0.1),
            ),
        )
        for on in PAPER_FEDERATIONS
    ],
    # The whole network at the paper's rate, as the released code trained it, with smaller images so that a
    # hundred rounds fit. 17 to 25 minutes of a core for each run.
    "whole_network": [
        head_study(
            "covid",
            "whole-network",
            WHOLE,
            *(*WHOLE_48, "--set", "weight_decay=5e-4", "--rounds", "100", "--lr", "0.005"),
            *("--eval-every", "5", "--seeds", "0", "--decompose", "100", "--decompose-samples", "40"),
        )
    ],
    # The same network from a closed start with centred steps. Five minutes for each run.
    "whole_network_centred": [
        head_study(
            "covid",
            "whole-network-centred",
            "fedavg,scaffold,fedavgm",
            *(*CENTRED, *WHOLE_48, "--average-models", "0.9", "--seeds", "0"),
        )
    ],
    # Accuracy against epsilon. Three minutes for each level.
    "private_heads": [
        private_study(on, level)
        for on in ("covid", "fundus-dirichlet0.5")
        for level in ("plain", "8", "4", "2", "1")
    ],
    # Small networks from scratch: the rules at other rates.
    "rules": [
        _retina_rules("0.05", f"{RULES},fedld-tensor"),
        small_study("covid-rules-lr0.01", "table1", "covidfl96", RULES, *COVID_SMALL, "--lr", "0.01"),
        _retina_rules("0.01", RULES),
    ],
    # Small networks from scratch: Tables 1 to 3 on the photographs of two programmes, one shared rate.
    "fundus": [
        small_study(
            "fundus-table1-dirichlet0.5",
            "table1",
            FUNDUS,
            SMALL,
            *(*FUNDUS_SMALL, "--lr", "0.05", "--splits", "retina-split3"),
        ),
        small_study(
            "fundus-table1-source",
            "table1",
            FUNDUS,
            TABLE1,
            *(*FUNDUS_SMALL, "--lr", "0.05", "--splits", "covid-fl", "--partition", "column:source"),
        ),
        small_study(
            "fundus-table2", "table2", FUNDUS, "", *FUNDUS_SMALL, "--lr", "0.05", "--splits", "retina-split3"
        ),
        small_study(
            "fundus-table3",
            "table3",
            FUNDUS,
            TABLE1,
            *("--batch-size", "20", "--image-size", "24", "--rounds", "100", "--decompose", "100"),
            *("--decompose-samples", "20", "--lr", "0.05"),
        ),
        small_study(
            "fundus-table1-dirichlet100-1",
            "table1",
            FUNDUS,
            "fedavg,fedprox,fedld,consensus",
            *(*FUNDUS_SMALL, "--lr", "0.05", "--splits", "retina-split1,retina-split2"),
        ),
    ],
    # Small networks from scratch: every method at its own rate; then ten seeds of the rules.
    "tuned": [
        small_study(
            "fundus-table1-tuned",
            "table1",
            FUNDUS,
            SMALL,
            *(*FUNDUS_SMALL, "--splits", "retina-split3"),
            search=Search(
                name="fundus",
                options=(
                    *("--preset", "retina-split3-small", *PAPER, "--image-size", "24", "--rounds", "15"),
                    *("--dataset", f"npz:DATA/{FUNDUS}/{FUNDUS}.npz"),
                ),
                rates=(0.01, 0.05, 0.2),
            ),
        ),
        small_study(
            "fundus-seeds",
            "table1",
            FUNDUS,
            f"{RULES},fedld-tensor",
            *(*FUNDUS_SMALL, "--splits", "retina-split3", "--seeds", TEN),
            *("--set", "fedld.lr=0.2", "--set", "fedld-tensor.lr=0.2"),
        ),
    ],
    # Small networks from scratch: Table 1 on COVID-FL by site, and on a published list of Retina.
    "covid": [
        small_study(
            "covid-table1",
            "table1",
            "covidfl96",
            f"{TABLE1},fedld-consensus,fedld-tensor,fedld-official,central",
            *(*COVID_SMALL, "--lr", "0.05"),
        )
    ],
    "retina_published": [
        small_study(
            "retina-table1",
            "table1",
            "retina_kaggle96",
            "fedavg,fedld,consensus",
            *("--image-size", "32", "--rounds", "20", *TERMS, "--lr", "0.05", "--splits", "retina-split3"),
        )
    ],
    # Every method against `local` on clients that are alike; FedMA and GAMF, which need a plain stack, apart.
    "methods": [
        Study(
            name="methods-head",
            command=(
                *("compare", "--dataset", "npz:DATA/covidfl96/covidfl96.npz", *ALIKE, "--clients", "12"),
                *(
                    "--image-size",
                    "96",
                    "--model",
                    "mobilenet_v2",
                    "--head",
                    "mlp:64",
                    "--weights",
                    "WEIGHTS",
                ),
                *("--train", "head", "--lr", "0.03", "--rounds", "15", "--set", "eval_every=3"),
                *("--seeds", "0,1,2,3,4"),
            ),
            methods="ALL",
        ),
        Study(
            name="methods-stack",
            command=(
                *("compare", "--dataset", "fundus-sim", *ALIKE, "--image-size", "24"),
                *("--rounds", "20", "--lr", "0.01", "--seeds", "0,1,2"),
            ),
            methods="fedavg,local,fedma,gamf",
        ),
    ],
}
PRETRAINED = (
    *("sensitivity_rate", "shared_heads", "tuned_heads", "figure2_heads", "table2_heads", "table3_heads"),
    *(
        "sensitivity_alpha",
        "last4",
        "last4_centred",
        "last4_averaged",
        "last4_variants",
        "closed_heads",
        "closed_trunk2",
        "long_heads",
        "long_tuned_heads",
        "whole_network",
        "whole_network_centred",
        "private_heads",
    ),
)
"""Parts with the pretrained trunk, which are run unless others are named."""
