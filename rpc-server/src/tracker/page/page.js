// Fetches the page again and again, and changes what has changed, so that selections and the scroll position stay.
'use strict';

const INTERVAL = 1000;
const live = document.getElementById('live');
const search = document.querySelector('#search input[type=search]');
let seen = Date.now();
// True while an answer is awaited. The latest search may differ from the one that it is for.
let asking = false;

function show(answers) {
  if (answers) seen = Date.now();
  live.className = answers ? 'on' : 'off';
  const ago = Math.round((Date.now() - seen) / 1000);
  const text = answers ? 'live' : `no answer for ${ago} s`;
  if (live.textContent !== text) live.textContent = text;
  // A tab in the background shows its title alone.
  if (!answers) document.title = 'no answer · tracker';
}

// Makes `old` like `fresh`, which was made from text in which everything of others is escaped.
function change(old, fresh) {
  if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName) {
    old.replaceWith(document.importNode(fresh, true));
    return;
  }
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.nodeValue !== fresh.nodeValue) old.nodeValue = fresh.nodeValue;
    return;
  }
  for (const { name } of [...old.attributes]) {
    if (!fresh.hasAttribute(name)) old.removeAttribute(name);
  }
  for (const { name, value } of fresh.attributes) {
    if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  const before = [...old.childNodes];
  const after = [...fresh.childNodes];
  after.forEach((node, at) => {
    if (at < before.length) change(before[at], node);
    else old.append(document.importNode(node, true));
  });
  before.slice(after.length).forEach((node) => node.remove());
}

async function update() {
  if (asking) return;
  asking = true;
  const address = location.pathname + location.search;
  try {
    const answer = await fetch(address, { cache: 'no-store', signal: AbortSignal.timeout(5000) });
    // A server or key that is gone has a page that says so.
    if (!answer.ok && answer.status !== 404) throw new Error(answer.statusText);
    const fresh = new DOMParser().parseFromString(await answer.text(), 'text/html');
    document.title = fresh.title;
    for (const part of ['header > p', 'main']) change(document.querySelector(part), fresh.querySelector(part));
    show(true);
  } catch {
    show(false);
  }
  asking = false;
  if (address !== location.pathname + location.search) await update();
}

// Searches while the user types. The address keeps the search, and the server filters.
search?.addEventListener('input', () => {
  const query = new URLSearchParams(location.search);
  if (search.value) query.set('search', search.value);
  else query.delete('search');
  history.replaceState(null, '', query.size ? `/?${query}` : '/');
  update();
});
search?.form.addEventListener('submit', (event) => event.preventDefault());

document.addEventListener('click', async (event) => {
  const button = event.target.closest?.('.copy');
  if (!button) return;
  const code = button.parentElement.querySelector('code');
  try {
    await navigator.clipboard.writeText(code.textContent);
  } catch {
    // The clipboard is for secure pages alone: the user copies what is selected.
    getSelection().selectAllChildren(code);
  }
});

async function run() {
  // Nobody looks at a page in the background.
  if (!document.hidden) await update();
  setTimeout(run, INTERVAL);
}

document.addEventListener('visibilitychange', () => { if (!document.hidden) update(); });
document.documentElement.classList.add('script');
show(true);
setTimeout(run, INTERVAL);
