"""Choose a penalty by cross-validation; each rank tries its part of the candidates."""

import numpy as np
from sklearn.linear_model import Ridge
from sklearn.model_selection import KFold, cross_val_score, train_test_split

import mpistrat as ms

strategy = ms.MirroredStrategy()
random = np.random.default_rng(0)
x = random.normal(size=(120, 10))
y = x @ random.normal(size=10) + random.normal(size=120)
x, x_test, y, y_test = train_test_split(x, y, test_size=20, random_state=0)  # the same on all ranks
folds = KFold(5, shuffle=True, random_state=0)


def score(penalty):
    return cross_val_score(Ridge(alpha=penalty), x, y, cv=folds).mean()


penalties = np.logspace(-2, 3, 11)
own_scores = np.array([score(penalty) for penalty in strategy.local_rows(penalties)])
scores = strategy.all_gather(own_scores, axis=0)  # in the order of the penalties
best = penalties[scores.argmax()]
model = Ridge(alpha=best).fit(x, y)
model.coef_ = strategy.broadcast(model.coef_)  # hosts may differ in the last bits of a fit
if strategy.rank == 0:
    print(best, model.score(x_test, y_test))
