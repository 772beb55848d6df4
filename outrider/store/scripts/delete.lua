-- ARGV: fence, or '' to delete whoever owns the session.
if redis.call('EXISTS', KEYS[1]) == 0 then
  return {'OK', 0}
end
if ARGV[1] ~= '' then
  local refused = refusal(ARGV[1])
  if refused then
    return refused
  end
end
redis.call('DEL', unpack(KEYS))
return {'OK', 1}
