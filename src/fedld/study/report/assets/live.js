
// While a run goes on: ask for the version, and put the new page's content in place when it has changed.
function setUpLive() {
  const status = document.querySelector(".live"), every = 2000;
  let version = null;
  const remembered = () => [...document.querySelectorAll("select, input, details")].map((part) => {
    const figure = part.closest("[id]");
    return [figure?.id, part.className, part.open, part.value];
  });
  const restore = (states) => {
    for (const [id, name, open, value] of states) {
      const part = [...(document.getElementById(id)?.querySelectorAll("select, input, details") ?? [])].find((p) => p.className === name);
      if (part?.tagName === "DETAILS" && open) part.open = true;
      if (part?.tagName === "SELECT" && part.options.length > value) { part.value = value; part.dispatchEvent(new Event("change")); }
    }
  };
  const replace = async () => {
    const answer = await fetch("/", { cache: "no-store" });
    if (!answer.ok) throw new Error(await answer.text());
    const next = new DOMParser().parseFromString(await answer.text(), "text/html");
    const states = remembered();
    for (const part of ["main", ".bar nav"]) document.querySelector(part).replaceWith(document.importNode(next.querySelector(part), true));
    setUp(document.querySelector("main"));
    restore(states);
    return answer.headers.get("X-Fedld-Version");
  };
  const look = async () => {
    try {
      const now = await (await fetch("/version", { cache: "no-store" })).text();
      if (version !== null && now !== version) {
        version = await replace();
        status.textContent = "updated " + new Date().toLocaleTimeString();
      } else {
        version ??= now;
      }
      status.textContent ||= "live";
    } catch {
      status.textContent = "no answer: the server has stopped";
    }
    setTimeout(look, every);
  };
  status.hidden = false;
  look();
}
setUpLive();
