// Requests to the server of this page.
const csrf = document.querySelector('meta[name="csrf-token"]').content;

export class Unreachable extends Error {}

async function send(address, options) {
  try {
    return await fetch(address, options);
  } catch {
    throw new Unreachable(address);
  }
}

export async function request(path, parameters = []) {
  const response = await send(`api/${path}?${new URLSearchParams(parameters)}`);
  if (response.status === 401) throw new Unreachable("the access token has changed");
  return response.json();
}

// Returns { done } or { problem }, both texts for the user.
export async function act(action, body) {
  const headers = { "Content-Type": "application/json", "X-CSRF-Token": csrf };
  const response = await send(`api/${action}`, { method: "POST", headers, body: JSON.stringify(body) });
  return response.status === 403 ? { problem: "the server was restarted; reload this page" } : response.json();
}
